"""Every controller of the page."""

from litestar import Controller

from service.web.asking import AskController
from service.web.assets import AssetController
from service.web.dialogs import DocumentDialogController, SessionDialogController, ShareDialogController
from service.web.library import LibraryController
from service.web.signing_in import SignInController, SignOutController

CONTROLLERS: list[type[Controller]] = [
    LibraryController,
    AskController,
    DocumentDialogController,
    SessionDialogController,
    ShareDialogController,
    SignInController,
    SignOutController,
    AssetController,
]
