"""A trained policy put to use: played, filmed, exported."""
