from .parse import parse_config as parse_config, read_config as read_config
from .schema import DEMO as DEMO, Config as Config
