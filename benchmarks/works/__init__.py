"""One work a file, or a family of works that share all but numbers."""
