"""After training: watch a policy play, film it, export it."""
