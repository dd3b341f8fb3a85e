"""efx.certify finds the defects of public implementations, written anew here, and no others."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from efx import certify
from efx.certify import command, subjects

VOCAB, WIDTH, CONTEXT = 17, 8, 32


def softmax(x, axis=-1):
    x = np.exp(x - x.max(axis=axis, keepdims=True))
    return x / x.sum(axis=axis, keepdims=True)


def rank(selected_BT):
    return np.maximum(np.cumsum(selected_BT, axis=1) - 1, 0)


class Model:
    """A decoder of a dense and a routed block, with a cache and packed rows, in numpy.

    Each method is what some public implementation gets wrong.
    """

    def __init__(self):
        rng = np.random.default_rng(0)
        self.embedding = rng.normal(size=(VOCAB, WIDTH))
        self.places = rng.normal(size=(CONTEXT, WIDTH))
        self.matrices = 0.4 * rng.normal(size=(2, 3, WIDTH, WIDTH))
        self.router = rng.normal(size=(2, WIDTH))
        self.off, self.calls, self.spent, self.claimed = set(), 0, 0, 0

    def logits(self, tokens_BT, positions_BT=None, segments_BT=None):
        if positions_BT is None:
            positions_BT = np.tile(np.arange(tokens_BT.shape[1]), (len(tokens_BT), 1))
            segments_BT = np.ones_like(positions_BT)
        return self.forward([None, None], tokens_BT, positions_BT, segments_BT)[0]

    def decode(self, cache, tokens_BT, positions_BT):
        segments_BT = (positions_BT >= 0).astype(int)
        return self.forward(cache, tokens_BT, positions_BT, segments_BT)

    def forward(self, cache, tokens_BT, positions_BT, segments_BT):
        self.calls += 1
        x_BTD, entries = self.embedding[tokens_BT], []
        for i, past in enumerate(cache):
            x_BTD, entry = self.block(i, x_BTD, positions_BT, segments_BT, past)
            entries.append(entry)
        return x_BTD @ self.embedding.T, entries

    def block(self, i, x_BTD, positions_BT, segments_BT, past):
        score_BT = x_BTD @ self.router[i]
        selected_BT = (segments_BT > 0) & (self.select(score_BT, segments_BT) if i else True)
        places_BT = self.place(i, positions_BT, selected_BT)
        h_BTD = self.norm(x_BTD) + self.places[places_BT]
        q_BTD, k_BTD, v_BTD = (h_BTD @ matrix for matrix in self.matrices[i])
        entry = [k_BTD, v_BTD, positions_BT, segments_BT, selected_BT]
        self.spent += self.stored(selected_BT).sum()
        self.claimed += selected_BT.sum()
        if past is not None:
            entry = [np.concatenate(pair, axis=1) for pair in zip(past, entry, strict=True)]
        k_BSD, v_BSD, key_positions_BS, key_segments_BS, valid_BS = entry
        visible_BTS = valid_BS[:, None] & self.same_document(segments_BT, key_segments_BS)
        new = 0 if past is None else past[0].shape[1]
        visible_BTS &= self.causal(positions_BT, key_positions_BS, new)
        scores_BTS = np.where(visible_BTS, q_BTD @ k_BSD.swapaxes(1, 2), -1e9)
        f_BTD = np.tanh(softmax(scores_BTS) @ v_BSD) @ self.matrices[i, 0]
        gate_BT = self.gate(score_BT, selected_BT) if i else np.ones_like(score_BT)
        f_BTD = f_BTD * (gate_BT * (i not in self.off))[..., None]
        return self.add(x_BTD, f_BTD, selected_BT), self.evicted(entry)

    def select(self, score_BT, segments_BT):
        return score_BT > 0

    def place(self, i, positions_BT, selected_BT):
        return np.maximum(positions_BT, 0)

    def norm(self, x_BTD):
        return x_BTD / np.sqrt(np.mean(x_BTD**2, axis=-1, keepdims=True) + 1e-6)

    def stored(self, selected_BT):
        return selected_BT

    def same_document(self, segments_BT, key_segments_BS):
        return segments_BT[:, :, None] == key_segments_BS[:, None]

    def causal(self, positions_BT, key_positions_BS, new):
        return key_positions_BS[:, None] <= positions_BT[:, :, None]

    def gate(self, score_BT, selected_BT):
        return 1 / (1 + np.exp(-score_BT))

    def add(self, x_BTD, f_BTD, selected_BT):
        return x_BTD + f_BTD * selected_BT[..., None]

    def evicted(self, entry):
        return entry

    def work(self, tokens_1T):
        """Keys that are computed, and those of the tokens that blocks select."""
        cache, self.spent, self.claimed = [None, None], 0, 0
        for t in range(tokens_1T.shape[1]):
            _, cache = self.decode(cache, tokens_1T[:, t : t + 1], np.full((1, 1), t))
        return self.spent, self.claimed

    def without(self, names, tokens_BT):
        self.off = {int(name.removeprefix("block_")) for name in names}
        logits_BTV = self.logits(tokens_BT)
        self.off = set()
        return logits_BTV

    def subject(self):
        return certify.Subject(
            self.logits,
            VOCAB,
            layouts=frozenset({"padding", "packing"}),
            tolerance=1e-8,
            init_cache=lambda batch, size: [None, None],
            decode=self.decode,
            ragged=True,
            work=self.work,
            parts={"block_0": (), "block_1": ()},
            without=self.without,
        )


def failures(subject):
    return {r.name for r in certify.certify(subject) if r.verdict == certify.FAIL}


# ---- defects: {the property that finds it: models} -----------------------------------------------


class SoftmaxOverTheSelectedSequence(Model):
    def gate(self, score_BT, selected_BT):
        return softmax(np.where(selected_BT, score_BT, -1e9))


class TopKOfTheSequence(Model):
    def select(self, score_BT, segments_BT):
        return score_BT >= np.quantile(score_BT, 0.5, axis=1, keepdims=True)


class MaskOffByOne(Model):
    def causal(self, positions_BT, key_positions_BS, new):
        return key_positions_BS[:, None] <= positions_BT[:, :, None] + 1


class NormOverTheSequence(Model):
    def norm(self, x_BTD):
        return x_BTD / x_BTD.std(axis=1, keepdims=True).clip(1e-3)


class TokensInTheOrderOfTheirScores(Model):
    """Under a triangular mask."""

    def block(self, i, x_BTD, *call):
        if not i or call[-1] is not None:
            return super().block(i, x_BTD, *call)
        order_BT1 = np.argsort(-(x_BTD @ self.router[i]), axis=1)[..., None]
        sorted_BTD, entry = super().block(i, np.take_along_axis(x_BTD, order_BT1, 1), *call)
        return np.take_along_axis(sorted_BTD, np.argsort(order_BT1, axis=1), 1), entry


class RenumberedPositions(Model):
    """Of the selected tokens of a call."""

    def place(self, i, positions_BT, selected_BT):
        return rank(selected_BT) if i else super().place(i, positions_BT, selected_BT)


class TopKAtDecode(Model):
    """Of one new token, which is always selected."""

    def select(self, score_BT, segments_BT):
        return np.full(score_BT.shape, True) if score_BT.shape[1] == 1 else score_BT > 0


class PositionsFromZeroAtDecode(Model):
    def decode(self, cache, tokens_BT, positions_BT):
        restarted_BT = positions_BT - positions_BT[:, :1].clip(0)
        return super().decode(cache, tokens_BT, restarted_BT.clip(-1))


class NewTokensSeeAllOfTheirChunk(Model):
    def causal(self, positions_BT, key_positions_BS, new):
        mask_BTS = super().causal(positions_BT, key_positions_BS, new)
        return mask_BTS | (np.arange(mask_BTS.shape[2]) >= max(new, 1)) if new else mask_BTS


class MaskAlignedToTheFirstKey(Model):
    """New token t sees the first t + 1 keys, those of the cache included."""

    def causal(self, positions_BT, key_positions_BS, new):
        shape = positions_BT.shape[1], key_positions_BS.shape[1]
        return np.tri(*shape, dtype=bool)[None] & np.full((len(positions_BT), 1, 1), True)


class CacheForgetsTooEarly(Model):
    def evicted(self, entry):
        return [x_BS[:, -6:] for x_BS in entry]


class CopiesShareTheirCache(Model):
    class Cache(list):
        def __deepcopy__(self, memo):
            return self

    def decode(self, cache, tokens_BT, positions_BT):
        logits_BTV, entries = super().decode(list(cache), tokens_BT, positions_BT)
        if cache[0] is None:
            return logits_BTV, self.Cache(entries)
        cache[:] = entries
        return logits_BTV, cache


class SelectedTokensAreMovedToTheFront(Model):
    """And all others are zeroed."""

    def add(self, x_BTD, f_BTD, selected_BT):
        count_B = selected_BT.sum(axis=1, keepdims=True)
        return (x_BTD + f_BTD) * (np.arange(x_BTD.shape[1]) < count_B)[..., None]


class SkippedTokensLoseTheirResidual(Model):
    def add(self, x_BTD, f_BTD, selected_BT):
        return (x_BTD + f_BTD) * selected_BT[..., None]


class NoBlock(Model):
    """The input is returned as it is."""

    def add(self, x_BTD, f_BTD, selected_BT):
        return x_BTD


class RowsCompete(Model):
    """For slots of the batch."""

    def select(self, score_BT, segments_BT):
        return score_BT > np.median(score_BT)


class BatchNorm(Model):
    def norm(self, x_BTD):
        return x_BTD / x_BTD.std(axis=0, keepdims=True).clip(1e-3)


class SlotsOfTheRowLength(Model):
    def select(self, score_BT, segments_BT):
        selected_BT = score_BT > 0
        return selected_BT & (rank(selected_BT) < score_BT.shape[1] // 4)


class CapacityOfACounter(Model):
    """It is annealed inside of the forward pass."""

    def select(self, score_BT, segments_BT):
        return score_BT > 1 / self.calls


class DropoutInEvaluation(Model):
    rng = np.random.default_rng(0)

    def add(self, x_BTD, f_BTD, selected_BT):
        return super().add(x_BTD, f_BTD * (self.rng.random(f_BTD.shape) > 0.1), selected_BT)


class RowOfNaN(Model):
    def __init__(self):
        super().__init__()
        self.embedding = np.concatenate([self.embedding[:-1], np.full((1, WIDTH), np.nan)])

    def forward(self, *args):
        logits_BTV, entries = super().forward(*args)
        return np.where(np.arange(VOCAB) == VOCAB - 1, 0, logits_BTV), entries


class DocumentsSeeEachOther(Model):
    def same_document(self, segments_BT, key_segments_BS):
        return (segments_BT[:, :, None] > 0) & (key_segments_BS[:, None] > 0)

    def causal(self, positions_BT, key_positions_BS, new):
        shape = positions_BT.shape[1], key_positions_BS.shape[1]
        return np.tri(*shape, shape[1] - shape[0], dtype=bool)[None]


class SlotsOfThePackedRow(Model):
    def select(self, score_BT, segments_BT):
        selected_BT = (score_BT > 0) & (segments_BT > 0)
        return selected_BT & (rank(selected_BT) < 8)


class PositionsIgnored(Model):
    """Under padding, and of packed documents."""

    def place(self, i, positions_BT, selected_BT):
        if positions_BT.shape[1] == CONTEXT:
            return np.tile(np.arange(CONTEXT), (len(positions_BT), 1))
        return super().place(i, positions_BT, selected_BT)


class PaddingIsAttendedTo(Model):
    def forward(self, cache, tokens_BT, positions_BT, segments_BT):
        shifted_BT = positions_BT - positions_BT.min(axis=1, keepdims=True)
        if cache[0] is None and positions_BT.shape[1] == CONTEXT:
            return super().forward(cache, tokens_BT, shifted_BT, np.maximum(segments_BT, 1))
        return super().forward(cache, tokens_BT, positions_BT, segments_BT)


class SleepingGate(Model):
    def gate(self, score_BT, selected_BT):
        return 1e-12 * super().gate(score_BT, selected_BT)


class CacheOfAllTokens(Model):
    """Keys of skipped tokens are computed and never read."""

    def stored(self, selected_BT):
        return np.ones_like(selected_BT)


DEFECTS = {
    "no look ahead": [
        SoftmaxOverTheSelectedSequence,
        TopKOfTheSequence,
        MaskOffByOne,
        NormOverTheSequence,
        TokensInTheOrderOfTheirScores,
    ],
    "cached decoding": [
        RenumberedPositions,
        TopKAtDecode,
        PositionsFromZeroAtDecode,
        CacheForgetsTooEarly,
    ],
    "chunked prefill": [NewTokensSeeAllOfTheirChunk, MaskAlignedToTheFirstKey],
    "copies of a cache": [CopiesShareTheirCache],
    "reads its tokens": [SelectedTokensAreMovedToTheFront, SkippedTokensLoseTheirResidual, NoBlock],
    "batch mates": [RowsCompete, BatchNorm],
    "row length": [SlotsOfTheRowLength],
    "determinism": [CapacityOfACounter, DropoutInEvaluation],
    "finite logits": [RowOfNaN],
    "packed neighbours": [DocumentsSeeEachOther, SlotsOfThePackedRow],
    "packed as if alone": [PositionsIgnored],
    "padding": [PaddingIsAttendedTo, PositionsIgnored],
    "sleeping parts": [SleepingGate],
    "skipped work": [CacheOfAllTokens],
}
PAIRS = [(name, defect) for name, defects in DEFECTS.items() for defect in defects]


def test_a_model_without_defect_passes_every_property():
    results = list(certify.certify(Model().subject()))
    assert {r.name for r in results if r.verdict != certify.PASS} == {
        "executed flops",
        "residuals once",
    }
    assert not failures(Model().subject())


@pytest.mark.parametrize("name, defect", PAIRS)
def test_a_defect_is_found(name, defect):
    assert name in failures(defect().subject())


class RouterSharedByAllBlocks(Model):
    def __init__(self):
        super().__init__()
        self.router[:] = self.router[0]


class AuxiliaryTargetsWithoutBatchOffset(Model):
    def loss(self, score_BT, selected_BT):
        targets = np.zeros(score_BT.size)
        targets[np.nonzero(selected_BT)[1]] = 1
        return np.mean((score_BT.ravel() - targets) ** 2)


@pytest.mark.parametrize("model", [RouterSharedByAllBlocks, AuxiliaryTargetsWithoutBatchOffset])
def test_a_defect_of_training_is_outside_of_what_logits_tell(model):
    assert not failures(model().subject())


# ---- the command ---------------------------------------------------------------------------------


def make_good():
    return Model().logits


def make_bad():
    return TopKOfTheSequence().logits


def make_subject():
    return Model().subject()


def make_shapeless():
    return lambda tokens_BT: Model().logits(tokens_BT)[:, -1]


def make_nan():
    return lambda tokens_BT: np.nan * Model().logits(tokens_BT)


def make_nothing():
    return None


GOOD = "test_certify:make_good"


@pytest.mark.parametrize(
    "target, status",
    [([GOOD, "--vocab-size=17"], 0), (["test_certify:make_bad", "--vocab-size=17"], 1),
     (["test_certify:make_subject"], 0)],
)  # fmt: skip
def test_a_callable_is_certified(target, status, capsys):
    assert command.main(target) == status
    table = capsys.readouterr().out
    assert "no look ahead" in table and ("FAIL" in table) == bool(status)
    assert command.main([*target, "--json"]) == status
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    row = rows["no look ahead"]
    assert row["verdict"] == ("FAIL" if status else "PASS")
    if status:  # the reproduction is enough to see it
        where, model = row["reproduction"], TopKOfTheSequence()
        tokens_1T = np.array([where["tokens"]])
        others_1T = np.where(np.arange(CONTEXT) < where["changed_from"], tokens_1T, 0)
        moved_1TV = model.logits(tokens_1T) - model.logits(others_1T)
        assert np.abs(moved_1TV[0, : where["changed_from"]]).max() > 0


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nowhere"], ["nowhere", "module:function"]),
        ([GOOD], ["--vocab-size"]),
        ([GOOD, "--vocab-size=1"], ["vocabulary", "2"]),
        ([GOOD, "--vocab-size=99"], ["IndexError"]),
        ([GOOD, "--vocab-size=9"], ["[8, 32, 17]", "[8, 32, 9]", "--vocab-size"]),
        (["test_certify:make_shapeless", "--vocab-size=17"], ["[8, 17]", "[8, 32, 17]"]),
        (["test_certify:make_nan", "--vocab-size=17"], ["NaN"]),
        (["test_certify:make_nothing", "--vocab-size=17"], ["NoneType", "callable"]),
        (["test_certify:absent"], ["absent"]),
        ([GOOD, "--vocab-size=17", "--text=absent.txt"], ["absent.txt"]),
    ],
)
def test_bad_input_is_one_line(arguments, words, capsys):
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words), error


def test_a_callable_of_jax_is_certified():
    table = np.random.default_rng(0).normal(size=(VOCAB, VOCAB))

    def logits(tokens_BT):
        x_BTV = jnp.asarray(table)[tokens_BT]
        return x_BTV + jnp.cumsum(x_BTV, axis=1)

    assert not failures(subjects.of_callable(logits, VOCAB))
