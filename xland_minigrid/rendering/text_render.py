"""Grids and rulesets as text, under the path that xminigrid's users import."""
from ..core.ruleset import print_ruleset
from ..viz.render import render_text as render
