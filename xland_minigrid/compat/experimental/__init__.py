"""The path of xminigrid's image observations."""
