"""Views, in the identifiers of xminigrid 0.9.3."""
from ..laws import crop_field_of_view, generate_viz_mask_minigrid, minigrid_field_of_view, transparent_field_of_view
