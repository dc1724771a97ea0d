"""Fast drop-ins for algorithms of SB3 and sb3-contrib. Stock SB3 loads their checkpoints."""
