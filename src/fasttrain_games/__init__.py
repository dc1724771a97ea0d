"""Skull King and Skirmish: games that attach to fasttrain by their entry points, as any package's can."""
