"""Tasks of MiniGrid, in the identifiers of xminigrid 0.9.3."""
