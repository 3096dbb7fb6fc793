"""Grids and rulesets as text, in the identifiers of xminigrid 0.9.3 and in its words."""
from ..pictures import (
    COLOR_NAMES, PLAYER_STR, RULE_TILE_STR, TILE_STR, encode_tile as _encode_tile, print_ruleset, render_text as render,
    text_encode_goal as _text_encode_goal, text_encode_rule as _text_encode_rule,
)
