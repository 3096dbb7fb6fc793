"""The names and paths of xminigrid 0.9.3, for programs written for it. Nothing else in the package imports this room."""
