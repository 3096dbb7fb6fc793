"""Image observations, under the path that xminigrid's users import."""
from ..viz.images import RGBImgObservationWrapper
