"""The names of ``kvframe_engine``, each under the module that defines it."""

from .drafts import find_drafts as find_drafts
from .embedding import Embedder as Embedder
from .engine import Engine as Engine
from .requests.output import RequestOutput as RequestOutput
from .requests.prompt import Prompt as Prompt
from .requests.request import SamplingParams as SamplingParams
from .running.pooling import EmbeddingOutput as EmbeddingOutput
from .testing.adapter_checks import adapter_checks as adapter_checks
from .testing.logits_processors import logits_processor_checks as logits_processor_checks
from .testing.proposers import proposer_checks as proposer_checks
from .testing.scheduling import scheduling_checks as scheduling_checks
