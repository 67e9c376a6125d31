"""The types of ``kvframe.engine``."""

from kvframe_engine import Embedder as Embedder
from kvframe_engine import EmbeddingOutput as EmbeddingOutput
from kvframe_engine import Engine as Engine
from kvframe_engine import Prompt as Prompt
from kvframe_engine import RequestOutput as RequestOutput
from kvframe_engine import SamplingParams as SamplingParams
from kvframe_engine import adapter_checks as adapter_checks
from kvframe_engine import find_drafts as find_drafts
from kvframe_engine import logits_processor_checks as logits_processor_checks
from kvframe_engine import proposer_checks as proposer_checks
from kvframe_engine import scheduling_checks as scheduling_checks
