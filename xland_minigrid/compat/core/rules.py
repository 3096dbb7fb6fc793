"""Rules, in the identifiers of xminigrid 0.9.3."""
from ...core.rules import MAX_RULE_ENCODING_LEN, NUM_RULES, BaseRule
from ..laws import (
    AgentHoldRule, AgentNearDownRule, AgentNearLeftRule, AgentNearRightRule, AgentNearRule, AgentNearUpRule, EmptyRule,
    TileNearDownRule, TileNearLeftRule, TileNearRightRule, TileNearRule, TileNearUpRule, check_rule,
)
