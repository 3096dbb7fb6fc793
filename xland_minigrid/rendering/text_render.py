"""Grids and rulesets as text, under the path that xminigrid's users import."""
from ..compat.names import print_ruleset, render_text as render
from ..compat.pictures import our_encode_tile as _encode_tile, our_text_encode_goal as _text_encode_goal, our_text_encode_rule as _text_encode_rule
