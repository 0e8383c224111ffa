"""A GGUF that is kept as it is, for the llamacpp engine: its tensors are linked or copied, never dequantized."""

from pathlib import Path

import gguf

from service.engine.models.errors import SourceRefused
from service.engine.models.gguf import is_gguf, reading
from service.engine.models.gguf_adapter import FILE_TYPE, merge_into_gguf
from service.engine.models.gguf_header import Header, read_header
from service.engine.models.gguf_support import check_gguf
from service.engine.models.light_transformers import AutoConfig, AutoTokenizer
from service.engine.models.quantized import Quantization, link
from service.engine.models.source import Progress, Source
from service.engine.models.support import check_architecture
from service.engine.models.weights import GGUF_NAME

METHOD = "gguf"


def read_kept(path: Path, adapter: Path | None, progress: Progress) -> Source:
    """Config and tokenizer of a GGUF, which an adapter will be merged into. Raises ModelImportError."""
    if not is_gguf(path):
        raise SourceRefused(f"{path} is not a GGUF file, and the llamacpp engine reads nothing else")
    progress("reading", 0, 2)
    header = read_header(path)
    check_gguf(header, kept=True)
    with reading(path) as place:
        config = AutoConfig.from_pretrained(**place)
        check_architecture(config)
        progress("reading", 1, 2)
        tokenizer = AutoTokenizer.from_pretrained(**place)
    progress("reading", 2, 2)
    config._name_or_path = ""
    return Source(
        label=path.name,
        config=config,
        generation_config=None,
        tensors={},
        tokenizer=tokenizer,
        tokenizer_json=tokenizer.backend_tokenizer.to_str().encode(),
        quantization=Quantization(METHOD, {"file_type": FILE_TYPE.name if adapter else _file_type(header)}),
        directory=path,
    )


def _file_type(header: Header) -> str:
    try:
        return gguf.LlamaFileType(header.number(gguf.Keys.General.FILE_TYPE, -1)).name
    except ValueError:
        return "MIXED"


def keep_gguf(source: Source, directory: Path, adapter: Path | None, progress: Progress) -> int:
    """Put the file and its config into a model directory, with an adapter merged in. The number of parameters. Raises
    AdapterRefused."""
    progress("writing", 0, 1)
    if adapter is None:
        link(source.directory, directory / GGUF_NAME)
    else:
        merge_into_gguf(source.directory, adapter, directory / GGUF_NAME, progress)
    source.config.save_pretrained(directory)
    progress("writing", 1, 1)
    return read_header(directory / GGUF_NAME).n_parameters
