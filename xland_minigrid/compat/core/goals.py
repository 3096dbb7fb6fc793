"""Goals, in the identifiers of xminigrid 0.9.3."""
from ...core.goals import MAX_GOAL_ENCODING_LEN, NUM_GOALS, BaseGoal
from ..laws import (
    AgentHoldGoal, AgentNearDownGoal, AgentNearGoal, AgentNearLeftGoal, AgentNearRightGoal, AgentNearUpGoal,
    AgentOnPositionGoal, AgentOnTileGoal, EmptyGoal, TileNearDownGoal, TileNearGoal, TileNearLeftGoal,
    TileNearRightGoal, TileNearUpGoal, TileOnPositionGoal, check_goal,
)
