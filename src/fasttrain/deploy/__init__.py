"""What to do with a trained policy: watch it play, film it, export it."""
