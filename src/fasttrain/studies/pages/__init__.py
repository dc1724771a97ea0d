"""What a report shows and how: files → numbers (`*_page`, `episodes`, `curves`) → charts → SVG, PNG and HTML."""
