"""After training: watch a policy play, and export it."""
