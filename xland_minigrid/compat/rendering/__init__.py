"""Text and images, in the identifiers of xminigrid 0.9.3."""
from . import rgb_render, text_render
