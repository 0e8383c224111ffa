"""How fast an installation is: warm, repeated, beside the physical bound, comparable with an earlier run."""
