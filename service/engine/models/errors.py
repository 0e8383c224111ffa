"""Errors of model directories.

ModelError
├── ModelNotFound            no model of that name, or no such directory
├── ModelDamaged             the files are not the ones that were recorded
├── CardVersionUnknown       written by a newer version of this program
├── KVTypeRefused            the KL gate failed for this KV type, or was never run
├── EngineRefused            this engine cannot serve the model, or not on this machine
├── DraftRefused             a draft model has other tokens than the model
└── ModelImportError         nothing was imported, nothing is left behind
    ├── SourceRefused        the source cannot be read as a model
    ├── ArchitectureRefused  the engine does not compute this architecture
    ├── AdapterRefused       the adapter does not fit, or uses a feature that is not merged
    ├── TokenizerRefused     the tokenizer cannot keep document text apart from control tokens
    └── NameTaken            a model of that name is there already
"""


class ModelError(Exception):
    """Base of all errors about models that this package raises on purpose."""


class ModelNotFound(ModelError):
    """No model of that name, or the directory is not a model."""


class ModelDamaged(ModelError):
    """A recorded file is missing, has another size or other content."""


class CardVersionUnknown(ModelError):
    """The card was written in a format that this version does not know."""


class KVTypeRefused(ModelError):
    """This KV type changes the model's predictions too much; the message has the measured figure."""


class EngineRefused(ModelError):
    """The model needs another engine, or a device that is not there."""


class DraftRefused(ModelError):
    """A token id of the draft model means another text than the model's; the message names the first."""


class ModelImportError(ModelError):
    """The import was refused; nothing became visible."""


class SourceRefused(ModelImportError):
    """The source is missing, incomplete or in a form that is not read."""


class ArchitectureRefused(ModelImportError):
    """The engine would compute this architecture wrongly, so it is not imported."""


class AdapterRefused(ModelImportError):
    """The adapter does not fit the model, or uses a feature that is not merged."""


class TokenizerRefused(ModelImportError):
    """The tokenizer would read control tokens in plain text, or its decoder is not understood."""


class NameTaken(ModelImportError):
    """A model of that name is there already."""
