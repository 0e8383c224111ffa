"""A document's rows are multiplied as many rows, however few they are."""

import pytest
import torch

from service.engine.exl2_engine.documents import DocumentModel


class Model:
    """Adds one to everything, in place where it may, and remembers how many rows it was given."""

    vocab_size = 7

    def __init__(self):
        self.rows = []

    def qkv(self, layer, x):
        self.rows.append(len(x))
        return x + 1, x + 2, x + 3

    def attention_out(self, layer, attention, x):
        assert len(attention) == len(x)
        self.rows.append(len(x))
        x += attention.reshape(x.shape)
        return x

    def mlp(self, layer, x):
        self.rows.append(len(x))
        return x.add_(1)


@pytest.mark.parametrize(("n", "given"), [(1, 33), (20, 33), (32, 33), (33, 33), (300, 300)])
def test_few_rows_are_given_more_and_come_back_as_they_were(n, given):
    model = Model()
    documents = DocumentModel(model)
    x = torch.arange(n * 4.0).view(n, 4)
    for i, part in enumerate(documents.qkv(0, x), 1):
        torch.testing.assert_close(part, x + i)
    torch.testing.assert_close(documents.attention_out(0, x.view(n, 2, 2), x.clone()), 2 * x)
    torch.testing.assert_close(documents.mlp(0, x.clone()), x + 1)
    assert model.rows == [given] * 3


def test_everything_else_is_the_model_s():
    assert DocumentModel(Model()).vocab_size == 7
