"""Checks of what was compiled for what: driver, CUDA, torch, exllamav2, the card's generation, number formats."""

import re
from collections.abc import Iterator

from service.doctor.context import Context
from service.doctor.facts import TorchFacts
from service.doctor.findings import Finding, together
from service.engine.factory import BF16_FLAGS
from service.planning.cards import FIRST_BF16, FIRST_EXL2, FIRST_TRITON, tried
from service.planning.nvidia import CardState

_LISTED = re.compile(r"(\d+\.\d)[a-z]?(\+PTX)?")
"""Of TORCH_CUDA_ARCH_LIST, where generations may also stand by name."""
_KNOWN = {
    "run": "The engine was run on this generation",
    "compiled": "The engine was compiled for this generation, not run on it (docs/cards.md)",
    "reasoned": "The engine was neither run on this generation nor compiled for it (docs/cards.md)",
}
_NOT_KNOWN = "the card's generation is not known"
_NOT_ON_CARD = "only the exl2 engine computes on a card with torch"


def versions(context: Context) -> Finding:
    """Whether driver, CUDA's compiler, torch and exllamav2 fit each other."""
    say, torch = context.finding("versions"), context.probes.torch()
    if torch.error:
        return say.fail(f"torch cannot be imported: {torch.error}", "install it again (docs/gpu.md)")
    if not context.on_card:
        return say.ok(f"torch {torch.version}")
    if wrong := list(_version_problems(context, torch)):
        return together(wrong)
    return say.ok(f"torch {torch.version} for CUDA {torch.cuda}, exllamav2 {torch.exllamav2}")


def _version_problems(context: Context, torch: TorchFacts) -> Iterator[Finding]:
    say, nvcc = context.finding("versions"), context.probes.nvcc()
    if not torch.cuda:
        yield say.fail(
            f"torch {torch.version} was built without CUDA",
            "install one for CUDA: pip install torch --index-url https://download.pytorch.org/whl/cu126",
        )
    elif wrong := _driver_problem(torch, context.cards()):
        yield say.fail(*wrong)
    if not torch.exllamav2:
        yield say.fail("exllamav2 is not installed", "pip install '.[gpu]' in Preread's folder (docs/gpu.md)")
    elif torch.extension_error:
        yield say.fail(
            f"the compiled part of exllamav2 {torch.exllamav2} cannot be loaded: {torch.extension_error}",
            "it was compiled for another torch or Python: remove ~/.cache/torch_extensions and import it again",
        )
    if torch.cuda and nvcc and nvcc.split(".")[0] != torch.cuda.split(".")[0]:
        yield say.warn(
            f"nvcc is of CUDA {nvcc}, torch of {torch.cuda}: what is compiled here may not load",
            f"install CUDA's compiler {torch.cuda}, or set CUDA_HOME to it",
        )


def _driver_problem(torch: TorchFacts, cards: list[CardState]) -> tuple[str, str] | None:
    """Within one major release a driver runs what was built for a later minor one."""
    if not cards or cards[0].cuda is None or int(torch.cuda.split(".")[0]) <= cards[0].cuda[0]:
        return None
    has = ".".join(map(str, cards[0].cuda))
    return (
        f"the driver {cards[0].driver} runs CUDA {has} at most, and torch {torch.version} was built for {torch.cuda}",
        f"update the driver, or install torch for CUDA {cards[0].cuda[0]}.x",
    )


def kernels(context: Context) -> Finding:
    """Whether kernels were compiled for the card's generation: else "no kernel image is available"."""
    say, cards = context.finding("kernels"), context.cards()
    if not context.on_card:
        return say.skip(_NOT_ON_CARD)
    if not cards or cards[0].capability is None:
        return say.skip(_NOT_KNOWN)
    capability, torch = cards[0].capability, context.probes.torch()
    name = f"sm_{capability[0]}{capability[1]}"
    if capability < FIRST_EXL2:
        return say.fail(
            f"{cards[0].name} is of {name}, and the exl2 engine needs sm_70 or newer",
            "serve a GGUF by llama.cpp: PREREAD_ENGINE=llamacpp (docs/llamacpp.md)",
        )
    if wrong := list(_kernel_problems(context, cards[0].name, capability)):
        return together(wrong)
    return say.ok(
        f"{cards[0].name} is of {name}; torch has {', '.join(torch.archs) or 'unknown kernels'}; attention is "
        f"{'plain torch' if capability < FIRST_TRITON else 'by Triton'}. {_KNOWN[tried(capability)]}"
    )


def _kernel_problems(context: Context, card: str, capability: tuple[int, int]) -> Iterator[Finding]:
    say, settings, torch = context.finding("kernels"), context.settings, context.probes.torch()
    generation, name = f"{capability[0]}.{capability[1]}", f"sm_{capability[0]}{capability[1]}"
    choices = {"PREREAD_ATTENTION_BACKEND": settings.attention_backend, "PREREAD_PRODUCT": settings.product}
    by_triton = [variable for variable, choice in choices.items() if choice == "triton"]
    if by_triton and capability < FIRST_TRITON:
        yield say.fail(
            f"{' and '.join(by_triton)}=triton, and {card} is of {name}: our Triton kernels need sm_80",
            f"set {' and '.join(by_triton)} to `auto`",
        )
    if torch.archs and not _runs_on(torch.archs, capability):
        yield say.fail(
            f"{card} is of {name}, torch {torch.version} has kernels for {', '.join(torch.archs)}",
            "install a torch that has them: builds for CUDA 12.6 and older have sm_70 (docs/gpu.md)",
        )
    built = context.probes.extension_archs()
    if built and not _runs_on(built, capability):
        yield say.fail(
            f"{card} is of {name}, exllamav2's extension was compiled for {', '.join(built)}",
            f"remove ~/.cache/torch_extensions and compile with TORCH_CUDA_ARCH_LIST={generation}",
        )
    wanted = context.probes.environment().get("TORCH_CUDA_ARCH_LIST", "")
    listed = [f"{'compute' if ptx else 'sm'}_{n.replace('.', '')}" for n, ptx in _LISTED.findall(wanted)]
    if listed and not _runs_on(listed, capability):
        yield say.fail(
            f"TORCH_CUDA_ARCH_LIST={wanted}, and {card} is of {name}",
            f"set TORCH_CUDA_ARCH_LIST to {generation}, or unset it",
        )


def _runs_on(archs: list[str], capability: tuple[int, int]) -> bool:
    """Machine code runs on later minor generations of its major one; PTX (`compute_`) on all later ones."""
    for arch in archs:
        kind, _, digits = arch.rstrip("af").partition("_")
        if not digits.isdigit():
            continue
        built = int(digits[:-1]), int(digits[-1])
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return False


def dtype(context: Context) -> Finding:
    """Whether the number format is one that card or processor computes with."""
    say, settings = context.finding("dtype"), context.settings
    if settings.engine == "torch":
        has = bool(context.probes.processor_flags() & BF16_FLAGS)
        if settings.compute_dtype == "bfloat16" and not has:
            return say.fail(
                "PREREAD_COMPUTE_DTYPE=bfloat16, and this processor has no BF16 products: they are emulated",
                "set it to `auto` or `float32`",
            )
        return say.ok(f"computes in {settings.compute_dtype}; the processor {'has' if has else 'lacks'} BF16")
    cards, plan = context.cards(), context.plan()
    if not context.on_card:
        return say.skip(_NOT_ON_CARD)
    if not cards or cards[0].capability is None:
        return say.skip(_NOT_KNOWN)
    stored = "" if isinstance(plan, str) else plan.model["weights"]
    if cards[0].capability < FIRST_BF16 and "BF16" in stored:
        return say.warn(
            f"the weights are stored in BF16, which {cards[0].name} does not have: they are computed in FP16, whose "
            "range is smaller",
            "use an EXL2 or GPTQ copy of the model; a prefill whose values leave the range of FP16 ends with an error",
        )
    return say.ok(f"{stored or 'the model'}, computed in FP16 on {cards[0].name}")
