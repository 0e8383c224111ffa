"""For the type checker alone: transformers' own package names every class of every model, in which a checker reads for
longer than in most of Preread. What `service/engine/models/light_transformers.py` takes from it, without types."""

from typing import Any

AttentionInterface: Any
AutoConfig: Any
AutoModelForCausalLM: Any
AutoTokenizer: Any
GenerationConfig: Any
masking_utils: Any
utils: Any

class PreTrainedTokenizerBase:
    def __getattr__(self, name: str) -> Any: ...
