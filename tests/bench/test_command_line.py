"""The command line: errors come in one line and at once."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from cases import example_results as example
from cases.rehearsal_case import ROOT, plan_of, small

import lora_bench
from batches import sha256_of
from bench import machine, option_checks, options, planning, published
from bench import results as store
from bench.experiment_records import Tokens
from bench.weights import resolve
from variants import ATTENTION_TARGETS, EXPERIMENT_ON_NF4


def bad(capsys, out, *arguments):
    """Run a command that should be refused, and return its one line."""
    before = sorted(out.rglob("*")) if out.is_dir() else None
    try:
        code = lora_bench.main(["--out", str(out), *arguments])
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2
    assert error.endswith("\n") and error.count("\n") == 1, error
    assert "Traceback" not in error
    assert before == (sorted(out.rglob("*")) if out.is_dir() else None), "something was written"
    return error


HUGE = "9" * 20


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--variants", "fusd_mlp"], "fusd_mlp: unknown; did you mean fused_mlp or "),
        (["--variants", "mlp"], "mlp: unknown; did you mean fused_mlp? --help lists"),
        (["--variants", "everything fused"], "did you mean fused_layer_graph_offload or "),
        (["--variants", "xyz"], f"xyz: unknown; --help lists all {len(options.VARIANTS)}\n"),
        (["--seq-lens", "16", "2"], "--seq-lens 2: give 3 or more"),
        (["--seq-lens", "2049", "--device", "cpu"], "max_position_embeddings of tiny is 2048"),
        (["--batch-size", "0"], "--batch-size 0: give 1 or more"),
        (["--rank", "0"], "--rank 0: give 1 or more"),
        (["--rank", "65", "--device", "cpu"], "--rank 65: the hidden_size of tiny is 64"),
        (["--accumulate", "0"], "--accumulate 0: give 1 or more"),
        (["--lora-dropout", "1"], "--lora-dropout 1: give 0 or more, and less than 1"),
        (["--lora-dropout", "nan"], "--lora-dropout nan: give 0"),
        (["--targets", "v_proj", "q_porj", "--device", "cpu"],
         "--targets q_porj: tiny has none; give some of q_proj k_proj v_proj o_proj gate_proj"),
        (["--targets", "q_proj", "v_proj", "--variants", "fused_mlp"],
         "fused_mlp: its projections would have no adapter under --targets q_proj v_proj; leave it "
         "out, or add one of gate_proj up_proj down_proj\n"),
        (["--targets", "up_proj", "--variants", "fused_all_but_attention_no_checkpointing"],
         "no adapter under --targets up_proj; leave it out, or add one of q_proj k_proj"),
        (["--suite", "published"], "one model at a time; give --model with one of configs/qwen2.5"),
        (["--suite", "published", "--model", "configs/tiny.json"], "no setting of tiny is known;"),
        (["--suite", "published", "--base", "nf4", "--model", "configs/llama3-8b.json"],
         "no setting of llama3-8b-nf4 is known; give --model with one of configs/qwen3-8b.json\n"),
        (["--suite", "published", "--model", "configs/qwen3-8b.json", "--device", "cpu"],
         "qwen3-8b needs an NVIDIA GPU"),
        (["--steps", "0"], "--steps 0: give 1 or more"),
        (["--steps", HUGE, "--rounds", "1"], "tokens a round"),
        (["--accumulate", HUGE], "tokens a round"),
        (["--steps", "82000", "--rounds", "10", "--batch-size", "32", "--seq-lens", "512"],
         "are 134,348,800 tokens a round at 512"),
        (["--gpus", "1"], "--gpus 1: give 2 to 64; it times one GPU alone"),
        (["--gpus", "65"], "--gpus 65: give 2 to 64"),
        (["--gpus", "2", "--interleave", "2"], "--gpus does not read --interleave: leave that out"),
        (["--gpus", "2", "--variants", "fused_layer_graph", "--device", "cpu"], "a CUDA graph "),
        (["--steps", "5", "--rounds", "2"], "does not spread evenly over --rounds 2"),
        (["--rounds", HUGE], f"--rounds {HUGE}: give 1 to 1000"),
        (["--interleave", "-1"], "--interleave -1: give 0 or more"),
        (["--seed", "-1"], "--seed -1: give 0 to 4294967295"),
        (["--cell-timeout", "nan"], "--cell-timeout nan: give more than 0 seconds"),
        (["--cell-timeout", "1e300"], "1,000,000 at most"),
        (["--suite", "some"], "invalid choice: 'some'"),
        (["--suite", "all", "--variants", "fused_mlp"], "--variants: not allowed with argument"),
        (["--model", "nowhere/at/all"], "no such folder"),
        (["--model", "nowhere.json"], "no such file; there are: configs/llama3-8b.json, configs/"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--cache", "/proc/x"], "--cache /proc/x: cannot be written"),
        (["--device", "cpu", "--allow-shared-gpu"], "a rehearsal uses no GPU"),
        (["--device", "cpu", "--kernels"], "no NVIDIA GPU to time the kernels on"),
        (["--device", "cpu", "--variants", "full_unsloth"], "Unsloth needs an NVIDIA GPU"),
        (["--device", "cpu", "--base", "nf4", "--variants", "fp8_layer"],
         "fp8_layer: its base has another precision; leave it out, or leave out --base nf4"),
        (["--fused"], "unrecognized arguments: --fused"),
        (["--plot-only"], "run the benchmark first"),
        (["--fits", "nan"], "--fits nan: give more than 0 GiB"),
        (["--fits", "24"], "run the benchmark first"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(capsys, tmp_path, arguments, words):
    assert words in bad(capsys, tmp_path, *arguments)


def test_packages_and_a_gpu_that_are_not_there(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(option_checks, "find_spec", lambda package: None)
    line = bad(capsys, tmp_path, "--device", "cpu", "--base", "nf4")
    assert '--base nf4: bitsandbytes is not installed; pip install -e ".[qlora]"\n' in line
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    assert "no NVIDIA GPU is visible" in bad(capsys, tmp_path, "--device", "cuda")
    monkeypatch.setattr(options, "missing_package", lambda variant: "unsloth")
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3")
    assert "--gpus 4: 2 visible here; give that or fewer" in bad(capsys, tmp_path, "--gpus", "4")
    line = bad(capsys, tmp_path, "--variants", "full_unsloth")
    assert "Unsloth is not installed; pip install -r dev/requirements/peers.txt" in line


def test_only_what_a_variant_is_about_needs_adapters():
    def refused(*targets):
        return {
            id for id in options.VARIANTS if options.why_unavailable(id, "cuda", "bf16", targets)
        }

    everywhere = refused(*options.TARGETS)
    assert refused("q_proj", "down_proj") == refused("some_other") == everywhere
    names = ("fused_mlp", "fused_all_but_mlp")
    both = {f"{name}{end}" for name in names for end in ("", "_no_checkpointing")}
    for targets in (("q_proj", "v_proj"), ATTENTION_TARGETS):
        assert refused(*targets) - everywhere == both


def test_the_experiment_on_nf4_has_what_runs_there_alone(monkeypatch):
    def asked(*words):
        return options.variants_of(options.parse(["--base", "nf4", *words], ""))

    monkeypatch.setattr(options, "missing_package", lambda variant: None)
    assert asked() == tuple(EXPERIMENT_ON_NF4)
    assert asked("--suite", "parts") == tuple(options.SUITES["parts"])
    assert "vanilla_peft_again" not in asked("--quick")
    assert {options.why_unavailable(id, "cuda", "nf4") for id in asked()} == {None}
    for id in ("fp8_layer", "vanilla_peft_fp32"):
        assert options.why_unavailable(id, "cuda") is None
        assert options.why_unavailable(id, "cuda", "nf4")


@pytest.mark.parametrize("name", published.SETTINGS)
def test_a_published_setting_is_the_default_and_nothing_else_is_run_under_its_name(
    name, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(machine, "gpu_name", lambda: "NVIDIA H100")
    setting = published.SETTINGS[name]
    asked = ("--suite", "published", "--model", f"configs/{setting.model}.json", "--base",
             setting.base)  # fmt: skip
    filled = options.fill_in(options.parse([*asked, "--steps", "5"], ""))
    assert filled.published == setting and (filled.steps, filled.rounds) == (5, 1)
    assert (filled.batch_size, filled.accumulate) == (setting.batch_size, setting.accumulate)
    for option, value in setting.is_that().items():
        assert getattr(filled, option) == value
    options.fill_in(options.parse([*asked, "--rank", "16"], ""))  # as it is
    for flag, value in (("--rank", "32"), ("--seq-lens", "64"), ("--targets", "q_proj"),
                        ("--lora-dropout", "0.1")):  # fmt: skip
        line = bad(capsys, tmp_path, *asked, flag, value)
        assert f"{flag}: {setting.page.name} has " in line
    source = resolve(filled.model, tmp_path, 0)
    folder = planning.run_folder(filled, source, Path(f"{sha256_of(filled.data)[:12]}.jsonl"))
    base = "-base-nf4" if setting.base == "nf4" else ""
    assert folder.name == f"nvidia-h100-published-{setting.model}{base}-5-steps-a-round"


@pytest.fixture
def late(tmp_path):
    """Options with data whose one label is five tokens from the start."""
    file = tmp_path / "data.jsonl"
    file.write_text('{"messages": [{"role": "assistant", "content": ""}]}')
    return "--data", str(file), "--padded", "--seq-lens", "3", "32"


TINY = json.loads((ROOT / "configs" / "tiny.json").read_text())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("no json", "not JSON"),
        ("[1]", "not a model's configuration"),
        ('{"architectures": [5]}', "not a model's configuration"),
        (json.dumps(TINY | {"hidden_size": "wide"}), "its hidden_size is 'wide'"),
        (json.dumps(TINY | {"model_type": "abacus"}), "transformers does not take it ("),
        (json.dumps(TINY | {"vocab_size": 100}), "vocab_size is 100, its tokenizer has 4096"),
        (json.dumps(TINY | {"pad_token_id": 4096}), "its pad_token_id 4096 is beyond its vocab_"),
        (json.dumps(TINY | {"num_attention_heads": 4, "num_key_value_heads": 3}),
         "4 attention heads are no multiple of 3 heads of k and v"),
        (json.dumps(TINY | {"head_dim": 15}), "its heads have 15 channels"),
        (json.dumps(TINY | {"model_type": "llama", "hidden_size": 66}), "does not take it (Class "),
        (json.dumps(TINY | {"quantization_config": {"quant_method": "fp8"}}), "are quantised ("),
        (json.dumps(TINY | {"model_type": "qwen2_5_vl"}), "qwen2_5_vl is no causal language model"),
        (json.dumps(TINY | {"model_type": "gpt_oss"}), "gpt_oss has no scaled_dot_product_att"),
        (json.dumps(TINY | {"model_type": "mamba"}), "mamba has no scaled_dot_product_attention"),
        (json.dumps(TINY | {"model_type": "bert"}), "its layers have query key value dense"),
        ('{"model_type": "gpt2", "vocab_size": 4096}', "its layers have no nn.Linear"),
        ('{"model_type": "t5", "vocab_size": 4096}', "t5 is no causal language model"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_model_we_train_says_why(capsys, tmp_path, late, config, words):
    model = tmp_path / "small.json"
    model.write_text(config)
    cache = str(tmp_path / "cache")
    arguments = ("--model", str(model), "--cache", cache, "--device", "cpu", *late[:2])
    assert words in bad(capsys, tmp_path / "out", *arguments)


def test_documents_of_a_model_in_which_plain_peft_mixes_them(capsys, tmp_path):
    model = tmp_path / "lfm2.json"
    kinds = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    model.write_text(json.dumps(TINY | kinds | {"model_type": "lfm2", "num_hidden_layers": 2}))
    arguments = ("--model", str(model), "--cache", str(tmp_path / "cache"), "--device", "cpu")
    said = bad(capsys, tmp_path / "out", *arguments, "--documents", "--quick")
    assert "in which vanilla PEFT mixes its documents" in said


def test_an_output_folder_that_cannot_be_written(capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("a file, not a folder")
    assert "cannot be written" in bad(capsys, file)
    assert "cannot be written" in bad(capsys, file / "out")


def test_results_of_another_kind_are_left_alone(capsys, tmp_path):
    (out := tmp_path / "out").mkdir()
    asked, path = small(tmp_path, "--out", str(out)), out / "results.json"
    store.save(path, example.run())
    assert "holds another run: model Qwen2.5-3B there, tiny here" in bad(capsys, out, *asked)
    path.write_text("{torn")
    assert "not whole JSON" in bad(capsys, out, *asked)
    assert path.read_text() == "{torn"
    path.unlink()
    path.mkdir()
    assert "results.json: Is a directory" in bad(capsys, out, *asked)


# --- a GPU that others compute on -----------------------------------------------------------------


@pytest.mark.slow
def test_what_is_wrong_with_an_argument_comes_before_who_else_is_on_the_gpu(
    capsys, tmp_path, monkeypatch, late
):
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(machine, "other_processes", lambda own, gpus=1: 3)
    out = tmp_path / "out"
    assert "3 other processes compute on the GPU" in bad(capsys, out, *late[:2])
    no_answer = "no row of --data reaches far enough into an answer to train every adapter"
    assert "xyz: unknown" in bad(capsys, out, "--variants", "xyz")
    assert f"--seq-lens 3: {no_answer}; give more, or other --data\n" in bad(capsys, out, *late)
    out.mkdir()
    store.save(out / "results.json", example.run())
    assert "holds another run" in bad(capsys, out, *late[:2])


# --- options that are given together --------------------------------------------------------------

GIVEN = {  # every option, as it is given
    "suite": ["all"], "variants": ["fused_mlp"], "seq_lens": ["64"], "batch_size": ["1"],
    "accumulate": ["2"], "targets": ["q_proj"], "lora_dropout": ["0.1"], "dora": [],
    "rank": ["8"], "steps": ["4"], "rounds": ["2"], "interleave": ["9"], "model": ["x.json"],
    "base": ["nf4"], "padded": [], "documents": [], "data": ["x.jsonl"],
    "seed": ["1"], "gpus": ["2"], "device": ["cpu"],
    "out": ["x"], "cache": ["x"], "cell_timeout": ["9"], "allow_shared_gpu": [], "kernels": [],
    "plot_only": [], "quick": [], "fits": ["24"], "compare": ["a", "b"],
}  # fmt: skip


def words_for(*names):
    return [word for name in names if name for word in (options.flag(name), *GIVEN[name])]


@pytest.mark.parametrize("command", options.READS)
def test_an_option_that_a_command_does_not_read_is_refused(command, capsys):
    everything = vars(options.parse([], ""))
    assert everything.keys() == GIVEN.keys(), "an option is new: say who reads it"
    for name in GIVEN.keys() - {command}:
        argv = words_for(command, name)
        if name in options.READS[command]:
            assert getattr(options.parse(argv, ""), name) != everything[name]
        elif command or name not in options.READS:
            with pytest.raises(SystemExit) as stop:
                options.parse(argv, "")
            line = capsys.readouterr().err
            assert stop.value.code == 2 and line.count("\n") == 1, line
            assert options.flag(command) in line and options.flag(name) in line


# --- at once --------------------------------------------------------------------------------------

WHAT_IS_IMPORTED = """
import sys
import lora_bench
for argv in (["--help"], ["--fused"], ["--plot-only", "--kernels"], ["--seq-lens", "2"],
             ["--variants", "xyz"], ["--model", "x.json"], ["--data", "x.jsonl"],
             ["--cache", "/proc/x"], ["--compare", "a", "b"], ["--fits", "0"],
             ["--plot-only", "--out", "/proc/x"]):
    try:
        assert lora_bench.main(argv) == 2, argv
    except SystemExit as stop:
        assert stop.code == (0 if "--help" in argv else 2), argv
    slow = {"torch", "triton", "transformers", "peft", "matplotlib", "scipy"} & set(sys.modules)
    if argv == ["--help"]:
        slow |= {"pynvml", "tokenizers", "rich", "numpy"} & set(sys.modules)
    assert not slow, (argv, slow)
from report import ablation_picture, benchmark_results, kernel_time, tables
assert "torch" not in sys.modules
"""


def test_help_and_errors_wait_for_no_import_and_what_draws_does_without_torch():
    run = subprocess.run([sys.executable, "-c", WHAT_IS_IMPORTED], cwd=ROOT, capture_output=True,
                         text=True)  # fmt: skip
    assert run.returncode == 0, run.stderr


WITHOUT_A_PACKAGE = """
import sys
from importlib import metadata

module, package, *argv = sys.argv[1:]
sys.modules[module] = None
installed = metadata.version

def version(name):
    if name == package:
        raise metadata.PackageNotFoundError
    return installed(name)

metadata.version = version
import lora_bench
sys.exit(lora_bench.main(argv))
"""


@pytest.mark.parametrize(
    ("module", "package", "argv"),
    [
        ("msgspec", "msgspec", ["--help"]),
        ("rich", "rich", ["--fits", "24"]),
        ("pynvml", "nvidia-ml-py", []),
        ("peft", "peft", []),  # processes alone import it
    ],
)
def test_a_missing_package_is_named_in_one_line_as_pip_knows_it(module, package, argv):
    run = subprocess.run([sys.executable, "-c", WITHOUT_A_PACKAGE, module, package, *argv],
                         cwd=ROOT, capture_output=True, text=True)  # fmt: skip
    line = f"lora_bench.py: {package} is not installed; pip install -r requirements.txt\n"
    assert (run.returncode, run.stderr) == (2, line)


def test_help_names_every_option_with_its_default_and_every_variant(capsys):
    with pytest.raises(SystemExit) as stop:
        lora_bench.main(["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for default in ("64 128 256 512", "default: 32; without a GPU 4", "default: 100", "qwen2.5-3b"):
        assert default in text
    for formats in ("a file of JSON lines, or", "prompt and completion"):
        assert formats in text
    for name, variant in options.VARIANTS.items():
        assert f"{name.removesuffix('_no_checkpointing')} {variant.plain_title}" in text


def test_the_command_is_recorded_without_the_folders_it_wrote_to():
    argv = ["/some/where/lora_bench.py", "--out", "/my/own", "--seq-lens", "64", "--cache=/mine"]
    assert planning.recorded(argv) == ["lora_bench.py", "--seq-lens", "64"]


def test_a_command_becomes_its_plan_and_is_recorded_as_planned(tmp_path):
    plan = plan_of(tmp_path, "--rank", "8", "--steps", "6", "--rounds", "2", "--accumulate", "3",
                   "--seq-lens", "32", "16", "--seed", "4")  # fmt: skip
    assert (plan.steps, plan.rounds, plan.seq_lens) == (3, 2, (16, 32))
    assert (plan.lora.rank, plan.lora.alpha, plan.lora.targets) == (8, 16, options.TARGETS)
    (batch,), (other,) = (one.batches(16, 2, 1) for one in (plan, replace(plan, seed=5)))
    assert not torch.equal(batch.input_ids, other.input_ids)
    found = planning.planned_experiment(plan)
    assert (found.steps, found.rounds, found.seq_lens, found.accumulate) == (6, 2, [16, 32], 3)
    assert (found.checkpointing, found.seed, found.lora) == ("on", 4, plan.lora)
    assert found.data_sha256 == sha256_of(plan.data)
    assert found.tokens_a_step(16) == 3 * 4 * 16
    half = msgspec.structs.replace(found, gpus=2, tokens={16: Tokens(padding=0.25, labelled=0.5)})
    assert half.tokens_a_step(16) == 2 * 3 * 4 * 16 * 0.75
