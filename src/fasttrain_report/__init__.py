"""Pages about runs, sweeps and studies, drawn from the files in their folders."""
