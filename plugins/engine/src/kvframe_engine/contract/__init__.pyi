"""The names of ``kvframe_engine.contract``, each under the module that defines it."""

from .errors import EngineError as EngineError
from .errors import PrefixFileError as PrefixFileError
from .logits import LogitsProcessor as LogitsProcessor
from .logits import ProcessedRequest as ProcessedRequest
from .logits import Vocabulary as Vocabulary
from .proposer import DraftRequest as DraftRequest
from .proposer import Proposer as Proposer
from .scheduling import FCFS as FCFS
from .scheduling import QueuedRequest as QueuedRequest
from .scheduling import SchedulingPolicy as SchedulingPolicy
