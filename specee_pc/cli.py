"""The command line: verbs and options, no logic; what a verb needs is imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO, Any

import click

from specee_pc import __version__, options
from specee_pc.errors import SpeceeError

EXISTING = click.Path(path_type=Path)
MODE = click.Choice(options.MODES)


class Failure(click.ClickException):
    """Ends the command with "error: ..." on stderr and exit code 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error: {self.format_message()}", file=file, err=file is None)


class Group(click.Group):
    """A group whose commands end in one line, never in a traceback, when they fail as foreseen."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SpeceeError as e:
            raise Failure(" ".join(str(e).split())) from None
        except MemoryError:
            raise Failure("out of memory") from None
        except BrokenPipeError:
            sys.stderr.close()  # or Python complains about stdout at its end
            ctx.exit(141)
        except OSError as e:
            where = f"{e.filename}: " if e.filename else ""
            raise Failure(f"{where}{e.strerror or e}") from None
        except KeyboardInterrupt:
            click.echo(err=True)
            ctx.exit(130)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
def main() -> None:
    """Speculative early exiting on llama.cpp: leave the layers that a token does not need."""


@main.command()
@click.argument("model", required=False, type=EXISTING)
@click.option("-p", "--prompt", help="Answer this and stop. Piped standard input does the same.")
@click.option("--mode", type=MODE, default=options.DEFAULT_MODE, show_default=True)
@click.option("--bundle", default="auto", show_default=True, help="A NAME.specee folder.")
@click.option("--stats", is_flag=True, help="Print speed, layers, exits and time shares.")
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option("--temp", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=float, default=0.95, show_default=True)
@click.option("--top-k", type=int, default=40, show_default=True)
@click.option("--min-p", type=float, default=0.05, show_default=True)
@click.option("--seed", type=int, help="Default: another one each time.")
@click.option("--max-tokens", type=int, default=512, show_default=True, help="Of each answer.")
@click.option("--ctx", type=int, help="Tokens of context. Default: the model's, at most 4096.")
@click.option("--threads", type=int, help="Default: the CPUs, halved from 8 up.")
def chat(
    temp: float, top_p: float, top_k: int, min_p: float, seed: int | None, **settings: Any
) -> None:
    """Talk to MODEL, a GGUF file. Without it: the embedded default."""
    sampling = options.SamplingOptions(temp, top_p, top_k, min_p, seed)
    chosen = options.ChatOptions(sampling=sampling, **settings)
    from specee_pc.chat import run_chat

    run_chat(chosen)


@main.command()
@click.argument("model", required=False, type=EXISTING)
@click.option("--prompts", type=EXISTING, multiple=True, help="JSON lines; one workload per file.")
@click.option("--limit", type=int, help="Prompts of each file.")
@click.option("--max-tokens", type=int, default=128, show_default=True)
@click.option("--modes", default="off,exact,calibrated", show_default=True)
@click.option("--threads", type=int, help="Default: the CPUs, halved from 8 up.")
@click.option("--repeats", type=int, default=3, show_default=True, help="Pairs with stock.")
@click.option("--json", type=EXISTING, help="Write the report here.")
@click.option("--quick", is_flag=True, help="Few prompts, short answers.")
@click.option("--bundle", default="auto", show_default=True, help="A NAME.specee folder.")
def bench(modes: str, **settings: Any) -> None:
    """Measure MODEL in each mode against stock llama.cpp."""
    names = tuple(name.strip() for name in modes.split(","))
    chosen = options.BenchOptions(modes=names, **settings)
    from specee_pc.bench.runner import run_bench

    run_bench(chosen)


@main.command()
@click.argument("model", type=EXISTING)
@click.option("--out", type=EXISTING, help="Bundle folder. Default: MODEL.specee beside it.")
@click.option("--threads", type=int, help="Default: the CPUs, halved from 8 up.")
@click.option("--fidelity", type=float, default=0.99, show_default=True)
@click.option("--prompts", type=EXISTING, help="JSON lines of calibration prompts.")
def fit(**settings: Any) -> None:
    """Fit a bundle for MODEL. Needs the fit extra (torch); a second run resumes a stopped one."""
    chosen = options.FitOptions(**settings)
    from specee_pc.fit import run_fit

    run_fit(chosen)


@main.group()
def models() -> None:
    """Models that specee-pc can bring."""


@models.command("get")
@click.argument("name")
def models_get(name: str) -> None:
    """Bring the model NAME into the user's cache folder; prints where it is."""
    from specee_pc import model_files

    click.echo(model_files.get(name, lambda line: click.echo(line, err=True)))


@models.command("list")
def models_list() -> None:
    """List the models and where they are."""
    from specee_pc import model_files

    for model in model_files.KNOWN.values():
        here = model.path.is_file()
        place = model.path if here else f"not here: specee-pc models get {model.name}"
        click.echo(f"{model.name}  {model.title}  {model.licence}  {place}")


@main.command("lib-path")
def lib_path() -> None:
    """Print the folder to set LLAMA_CPP_LIB_PATH to, for apps that import llama_cpp first."""
    from specee_pc import _native

    click.echo(_native.library_file(_native.library_dir()).parent)


if __name__ == "__main__":
    main()
