from lowp.formats import FORMATS
from lowp.formats import parse as format

__version__: str

__all__ = ["FORMATS", "__version__", "format"]
