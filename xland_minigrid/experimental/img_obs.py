"""Image observations, under the path that xminigrid's users import."""
from ..compat.names import RGBImgObservationWrapper
