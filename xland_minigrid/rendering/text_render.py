"""Grids and rulesets as text, under the path that xminigrid's users import."""
from ..compat.names import print_ruleset, render_text as render
