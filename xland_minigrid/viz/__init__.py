"""Everything that you look at: pictures of grids and tasks, rollout players, figures; and images as observations."""
from .images import RGBImgObservationWrapper, images_from_observations
from .player import Bars, Player, play, play_rollout
from .plots import adaptation_curve, generalization_curves, group_bars, learning_curves, training_curve
from .render import (Picture, describe_grid, draw_tile, field_of_view, grid_html, render, render_observation,
                     render_text, show, to_png, view_to_world)
from .tree import Drawing, draw_ruleset, task_tree
