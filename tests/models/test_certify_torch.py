"""efx.certify on PyTorch: parts of modules, FLOPs, folders of transformers."""

import dataclasses
import json

import pytest
from test_certify import VOCAB, WIDTH, failures

from efx.certify import command

torch = pytest.importorskip("torch", reason="the extra `interop` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `interop` is not installed")

from torch.utils import flop_counter  # noqa: E402

from efx.certify import torch_models  # noqa: E402

torch.set_num_threads(1)  # on a busy machine threads wait for each other


class Mean(torch.nn.Linear):
    """Of the tokens so far."""

    def forward(self, x_BTD):
        counts_T1 = torch.arange(1, x_BTD.shape[1] + 1)[:, None]
        return super().forward(x_BTD.cumsum(dim=1) / counts_T1)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.mlp = Mean(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        torch.nn.init.zeros_(self.mix.bias)

    def forward(self, x_BTD):
        x_BTD = x_BTD + self.mix(x_BTD)
        return x_BTD + self.mlp(x_BTD)


class DoubledResidual(Layer):
    def forward(self, x_BTD):
        return x_BTD + super().forward(x_BTD)


class GatedResidual(Layer):
    """w * (x + f)."""

    def forward(self, x_BTD):
        return x_BTD[..., :1] * super().forward(x_BTD)


class Experts(Layer):
    """The last expert is never chosen."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x_BTD):
        x_BTD = super().forward(x_BTD)
        is_first = x_BTD[..., :1] > 0
        a, b, _ = (expert(x_BTD) for expert in self.experts)
        return x_BTD + torch.where(is_first, a, b)


class Masks(Layer):
    """An MLP for every eighth token, which computes all."""

    def forward(self, x_BTD):
        is_routed = torch.arange(x_BTD.shape[1])[:, None] % 8 == 0
        return x_BTD + self.mix(x_BTD) + is_routed * self.mlp(x_BTD)


class Gathers(Layer):
    def forward(self, x_BTD):
        y_BTD = x_BTD + self.mix(x_BTD)
        added = torch.zeros_like(y_BTD)
        added[:, ::8] = self.mlp(x_BTD[:, ::8])
        return y_BTD + added


class TorchModel(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(VOCAB, WIDTH)
        self.layers = torch.nn.ModuleList(layer() for _ in range(4))

    def forward(self, tokens_BT):
        x_BTD = self.embed(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return x_BTD @ self.embed.weight.T


def claims(tokens_BT):
    matrices = 4 * (1 + 1 / 8) * WIDTH**2 + WIDTH * VOCAB
    return 2 * tokens_BT.size * matrices


@pytest.mark.parametrize(
    "layer, expected",
    [
        (Layer, set()),
        (Gathers, set()),
        (Masks, {"executed flops"}),
        (DoubledResidual, {"residuals once"}),
        (GatedResidual, {"residuals once"}),
        (Experts, {"sleeping parts"}),
    ],
)
def test_a_defect_of_a_module_is_found(layer, expected):
    subject = torch_models.of_callable(TorchModel(layer), VOCAB)
    if layer in (Masks, Gathers):

        def count(tokens_BT):
            with flop_counter.FlopCounterMode(display=False) as counter:
                subject.logits(tokens_BT)
            return counter.get_total_flops(), claims(tokens_BT)

        assert failures(dataclasses.replace(subject, flops=count)) == expected
    else:
        assert failures(subject) == expected


GPT = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)
ARCHITECTURES = {
    "gpt2": GPT,
    "mixtral": dict(num_local_experts=4),
    "mamba": {},
    "llama": {},
    "mistral": dict(sliding_window=8),
    "gemma2": dict(sliding_window=8, head_dim=8),
    "qwen2": {},
    "qwen3_moe": dict(num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2, head_dim=8),
    "gpt_neox": {},
    "olmo2": {},
    "phi": {},
    "bloom": dict(n_layer=2, n_head=4),
}


def causal_lm(name):
    torch.manual_seed(0)
    small = dict(
        vocab_size=45,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        **dict(pad_token_id=0, bos_token_id=1, eos_token_id=2),
    )
    config = transformers.AutoConfig.for_model(name, **small | ARCHITECTURES[name])
    return transformers.AutoModelForCausalLM.from_config(config)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in [*ARCHITECTURES][3:]]


@pytest.mark.parametrize("name", [*[*ARCHITECTURES][:3], *SLOW])
def test_no_false_alarm_on_an_architecture_of_transformers(name):
    assert not failures(torch_models.of_causal_lm(causal_lm(name)))


def test_a_folder_of_transformers_is_certified(tmp_path, capsys):
    folder = tmp_path / "gpt2"
    causal_lm("gpt2").save_pretrained(folder)
    assert command.main([str(folder)]) == 0
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "other", "auto_map": {"AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert command.main([str(folder)]) == 2
    assert "--trust-remote-code" in capsys.readouterr().err
