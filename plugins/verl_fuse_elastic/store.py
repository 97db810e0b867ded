"""The predictor's state beside verl's checkpoints: written with each, read by the run that goes on from one."""

import json
import logging
from pathlib import Path

from verl_fuse.errors import FuseError
from verl_fuse.spec import files
from verl_fuse_elastic.prediction import LengthPredictor

logger = logging.getLogger(__name__)

NAME = "fuse_elastic_lengths.json"


def save(predictor: LengthPredictor, folder: Path) -> None:
    """Write the state into a checkpoint's folder; where the disk refuses, the checkpoint stays good without it."""
    try:
        files.save(folder / NAME, json.dumps(predictor.to_dict()))
    except FuseError as error:
        logger.error("response lengths are not in this checkpoint: %s", error)


def load(folder: Path | None) -> LengthPredictor:
    """The state of the checkpoint that the run goes on from; a new one for a new run, or, with a warning, where the checkpoint has none."""
    if folder is None:
        return LengthPredictor()
    file = folder / NAME
    if not file.exists():
        logger.warning("%s is not there: response lengths are learned anew", file)
        return LengthPredictor()
    return files.load(file, _parsed)


def _parsed(text: str) -> LengthPredictor:
    try:
        return LengthPredictor.from_dict(json.loads(text))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FuseError(
            f"not what fuse.elastic writes with a checkpoint ({type(error).__name__}: {error}); delete it to learn response lengths anew"
        ) from error
