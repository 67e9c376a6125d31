"""Let an evaluation harness score a served model, and the same model in transformers. See benchmarks/README.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from benchmarks.harness.pages import heading, page, table
from benchmarks.harness.record import benchmark
from benchmarks.serving.running import save_model, served

HARNESS = Path(os.environ.get("PEERS", ".cache/peers")) / "lm_eval"
MOST_DIFFERENCE = 1e-3
"""The most that a log-likelihood of a text may differ: both sides compute in float32, in other batches."""

_TASKS = {
    "choice": """
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
""",
    "text": """
task: text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
""",
    "continue": """
task: continue
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
""",
}
"""Tasks of the three kinds of requests that the harness has."""


def write_tasks(folder: Path, num_documents: int) -> None:
    """Write the tasks and their documents: sums, with right and wrong results."""
    documents = []
    for index in range(num_documents):
        left, right = 3 + 7 * index % 50, 11 * index % 40
        choices = [str(left + right), str(left + right + 1), str(abs(left - right)), str(left * right)]
        place = index % 4
        choices[0], choices[place] = choices[place], choices[0]
        question = f"Q: {left} + {right} = ? A:"
        text = f"{left} plus {right} is {left + right}, said the teacher of class {index}."
        documents.append({"question": question, "choices": choices, "answer": place, "text": text})
    data = folder / "documents.jsonl"
    data.write_text("".join(f"{json.dumps(document)}\n" for document in documents), encoding="utf-8")
    for name, task in _TASKS.items():
        (folder / f"{name}.yaml").write_text(task.format(data=data), encoding="utf-8")


def evaluate(tasks: Path, output: Path, model: str, arguments: Mapping[str, Any], *options: str) -> dict[str, Any]:
    """Run the harness; return its scores by task, and each document's responses."""
    command = [
        HARNESS / "bin" / "lm_eval",
        "--model",
        model,
        "--tasks",
        ",".join(_TASKS),
        "--include_path",
        tasks,
        "--model_args",
        ",".join(f"{name}={value}" for name, value in arguments.items()),
        "--output_path",
        output,
        "--log_samples",
        *options,
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(output), "OPENAI_API_KEY": "any"}
    ran = subprocess.run([*map(str, command)], env=os.environ | offline, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"the evaluation harness failed: {ran.stderr[-3000:]}")
    (results,) = output.rglob("results_*.json")
    scores = json.loads(results.read_text(encoding="utf-8"))["results"]
    return {
        "scores": {
            task: {name.partition(",")[0]: value for name, value in scores[task].items() if isinstance(value, float)}
            for task in _TASKS
        },
        "responses": {task: _responses(next(output.rglob(f"samples_{task}_*.jsonl"))) for task in _TASKS},
    }


def _responses(file: Path) -> list[Any]:
    samples = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [sample["filtered_resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]


def compare(responses: Sequence[Any], peer_responses: Sequence[Any]) -> tuple[int, float]:
    """Return how many responses differ as values, and the most by which their numbers differ."""
    num_different, largest = 0, 0.0

    def walk(left: Any, right: Any) -> None:
        nonlocal num_different, largest
        if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
            for parts in zip(left, right, strict=True):
                walk(*parts)
        elif left != right:
            try:
                largest = max(largest, abs(float(left) - float(right)))  # the harness writes numbers as texts
            except (TypeError, ValueError):
                num_different += 1

    walk(list(responses), list(peer_responses))
    return num_different, largest


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    rows = [
        (
            task,
            str(record["num_documents"]),
            ", ".join(f"{name} {value:.4f}" for name, value in sorted(result["scores"]["kvframe serve"].items())),
            ", ".join(f"{name} {value:.4f}" for name, value in sorted(result["scores"]["transformers"].items())),
            str(result["different"]),
            f"{result['most_difference']:.1e}",
        )
        for task, result in record["tasks"].items()
    ]
    return page(
        heading(
            "An evaluation harness and a served model",
            record,
            f": lm-eval {record['harness']}, `local-completions` against `kvframe serve`, `hf` in transformers.",
            "A tiny Llama with random weights, float32; the documents are sums.",
            how="Run",
        ),
        table(("task", "documents", "kvframe serve", "transformers", "answers that differ", "most difference"), rows),
    )


@benchmark(
    "evaluation",
    write_report,
    fails=lambda record: any(
        result["different"] or result["most_difference"] > MOST_DIFFERENCE for result in record["tasks"].values()
    ),
)
@click.option("--documents", default=40, show_default=True, help="Documents of each task.")
def main(documents: int) -> dict[str, Any]:
    """Score a tiny model through the server and in transformers, and compare."""
    if not (HARNESS / "bin" / "lm_eval").exists():
        sys.exit("the evaluation harness is not installed; type: make harness")
    with TemporaryDirectory() as folder:
        root = Path(folder)
        model = save_model(root / "tiny")
        tasks = root / "tasks"
        tasks.mkdir()
        write_tasks(tasks, documents)
        with served(model, root) as server:
            ours = evaluate(
                tasks,
                root / "ours",
                "local-completions",
                {
                    "model": "tiny",
                    "base_url": f"{server.url}/v1/completions",
                    "tokenizer": model,
                    "num_concurrent": 4,
                    "max_retries": 1,
                    "max_length": 512,
                },
                "--batch_size",
                "8",
            )
        theirs = evaluate(
            tasks,
            root / "theirs",
            "hf",
            {"pretrained": model, "dtype": "float32", "max_length": 512},
            "--device",
            "cpu",
        )
    results = {}
    for task in _TASKS:
        different, largest = compare(ours["responses"][task], theirs["responses"][task])
        scores = {"kvframe serve": ours["scores"][task], "transformers": theirs["scores"][task]}
        results[task] = {"scores": scores, "different": different, "most_difference": largest}
    version = subprocess.run(
        [HARNESS / "bin" / "python", "-c", "from importlib.metadata import version; print(version('lm_eval'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {"num_documents": documents, "harness": version.stdout.strip(), "tasks": results}


if __name__ == "__main__":
    main()
