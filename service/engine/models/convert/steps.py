"""The steps of a conversion, each begun anew or gone on with: exllamav2's functions over one job. On a card."""

import gc
import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from service.engine.exl2_engine.exllama_loading import check_sizes, model_view
from service.engine.exl2_engine.spec import read_spec
from service.engine.models.convert import work as files
from service.engine.models.convert.layers import Attention
from service.engine.models.convert.request import Request
from service.engine.models.errors import SourceRefused

_STATES = "hidden_states.safetensors"
_MEASURED_OUTPUTS = 16
"""As the converter sets it while it measures: the head is not used then."""
ORDER = ("reference", "measure_states", "measure", "optimize", "states", "quantize", "compile", "finished")


class Steps:
    """One conversion. `run` returns when the weights lie in the work directory's `exl2`."""

    def __init__(self, directory: Path, request: Request, job: dict[str, Any]) -> None:
        self._directory, self._request, self._job = directory, request, job
        # the directory may have been moved since
        job |= {"out_dir": str(directory), "cal_filename": str(directory / "cal_data.safetensors")}
        self._source = Path(request.source)
        self._spec = read_spec(self._source)
        check_sizes(self._spec)

    def run(self) -> None:
        """Raises SourceRefused for weights whose activations FP16 does not hold, and what exllamav2 raises."""
        from exllamav2.attn import ExLlamaV2Attention  # pyright: ignore[reportMissingImports]

        attention = Attention(self._spec)
        ExLlamaV2Attention.forward_torch = lambda module, *args, **options: attention(module, *args, **options)
        with ExitStack() as stack:
            self._view = stack.enter_context(model_view(self._source, self._spec))
            while (step := self._job["progress"]) != "finished":
                getattr(self, f"_{step}")()
                gc.collect()
                torch.cuda.empty_cache()
                self._job["progress"] = self._next(step)
                self._save()

    def _next(self, step: str) -> str:
        if step == "reference" and "reuse_measurement" in self._job:
            return "optimize"
        return ORDER[ORDER.index(step) + 1]

    def _save(self) -> None:
        files.save_job(self._directory, self._job)

    def _model(self, max_output_len: int | None = None) -> Any:
        """exllamav2's model without its weights: they are loaded module by module."""
        from exllamav2 import ExLlamaV2, ExLlamaV2Config  # pyright: ignore[reportMissingImports]

        config = ExLlamaV2Config(str(self._view))
        config.no_flash_attn = config.no_xformers = True
        config.max_output_len = max_output_len
        model = ExLlamaV2(config)
        model.load(lazy=True)
        return model

    def _reference(self) -> None:
        """The source's own predictions of the held-out texts, before hours are spent on weights that FP16 does not
        hold."""
        texts = load_file(self._directory / files.HELD_OUT_NAME)
        save_file(self._logits(self._model(), texts), self._directory / files.REFERENCE_NAME)

    @torch.inference_mode()
    def _logits(self, model: Any, texts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        from exllamav2.attn import ExLlamaV2Attention  # pyright: ignore[reportMissingImports]

        states = {name: self._embedded(model, ids) for name, ids in texts.items()}
        for done, module in enumerate(model.modules[1:], 1):
            _status("Reference", done, len(model.modules))
            module.load()
            for name, x in states.items():
                params = ExLlamaV2Attention.Params(1, x.shape[1], 0, None, None)
                states[name] = module.forward(x.to("cuda:0"), None, params).cpu()
                if not torch.isfinite(states[name]).all():
                    raise SourceRefused(
                        f"in {module.key} activations exceed the range of FP16, which exllamav2 computes in: these "
                        "weights cannot be converted"
                    )
            module.unload()
        return {name: x[0, :, : self._spec.vocab_size].half().contiguous() for name, x in states.items()}

    def _embedded(self, model: Any, ids: Tensor) -> Tensor:
        """First hidden states ``[rows, tokens, hidden]``. Granite's factor is not in the config that exllamav2 sees."""
        module = model.modules[0]
        module.load()
        states = module.forward(ids)
        module.unload()
        return states if self._spec.embedding_factor == 1 else states * self._spec.embedding_factor

    def _measure_states(self) -> None:
        self._start_states("measured")

    def _states(self) -> None:
        self._start_states("rows")

    @torch.inference_mode()
    def _start_states(self, which: str) -> None:
        """In the files and under the names that the converter reads."""
        ids = load_file(self._directory / files.CALIBRATION_NAME)[which]
        save_file({"input_ids": ids}, self._job["cal_filename"])
        states = self._embedded(self._model(), ids)
        rows = {f"row.{i:05}": states[i : i + 1].contiguous() for i in range(len(states))}
        save_file(rows, self._directory / _STATES)

    def _measure(self) -> None:
        from exllamav2.conversion.measure import measure_quant  # pyright: ignore[reportMissingImports]

        measure_quant(self._job, self._save, self._model(_MEASURED_OUTPUTS), 0)

    def _optimize(self) -> None:
        from exllamav2.conversion.optimize import optimize  # pyright: ignore[reportMissingImports]

        optimize(self._job, self._save, self._model())
        measured = {name: self._job[name] for name in ("measurement", "last_module_idx")}
        (self._directory / files.MEASURED_NAME).write_text(json.dumps(measured))

    def _quantize(self) -> None:
        from exllamav2.conversion.quantize import quant  # pyright: ignore[reportMissingImports]

        (self._directory / "out_tensor").mkdir(exist_ok=True)
        quant(self._job, self._save, self._model())

    def _compile(self) -> None:
        from exllamav2.conversion.compile import compile_model  # pyright: ignore[reportMissingImports]

        for left in self._directory.glob("output*.safetensors"):
            left.unlink()
        compile_model(self._job, self._save, self._model())
        _collect(self._directory)


def _status(stage: str, done: int, total: int) -> None:
    """As exllamav2's `print_stage`."""
    print(f"[STATUS]{json.dumps({'stage': stage, 'completion': round(done / total, 4)})}[/STATUS]", flush=True)


def _collect(directory: Path) -> None:
    """Move the converter's output to a directory of its own."""
    target = directory / files.RESULT_NAME
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in sorted(directory.glob("output*.safetensors")):
        path.rename(target / path.name)
