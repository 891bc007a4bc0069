"""Print the lecture's tables, a model, the names of all, or who chose what.

jaxformer zoo                    # the tables
jaxformer zoo llama-2-70b        # one model: options, parameters, FLOPs, cache
jaxformer zoo --axis position    # which models made which choice
"""

import argparse
from pathlib import Path

from jaxformer import config as c
from jaxformer import costs
from jaxformer.config import python_source
from jaxformer.errors import described, own_command, readable_errors
from jaxformer.interop import coverage
from jaxformer.zoo import AXES, MixtureRow, SurveyRow, get, mixtures, printing, survey
from jaxformer.zoo.printing import describe_row

MAX_LENGTH = 4096


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and print."""
    plain = argparse.RawDescriptionHelpFormatter
    text = described(str(__doc__), "zoo")
    parser = argparse.ArgumentParser(own_command("zoo"), description=text, formatter_class=plain)
    one = parser.add_mutually_exclusive_group()
    name_help = "a preset, such as llama-2-70b, or a .json file written by config.to_json"
    one.add_argument("name", nargs="?", help=name_help)
    one.add_argument("--list", action="store_true", help="name all presets")
    one.add_argument("--markdown", action="store_true", help="all tables, for a guide")
    axis_help = f"list which models made which choice: {', '.join(AXES)}"
    one.add_argument("--axis", help=axis_help)
    coverage_help = "list the model types of a library, and what the unread types lack"
    one.add_argument("--coverage", choices=["transformers"], help=coverage_help)
    options = parser.parse_args(arguments)
    with readable_errors():
        if options.list:
            print(printing.preset_listing())
        elif options.markdown:
            tables = printing.survey_markdown(), printing.mixture_markdown(), coverage.markdown()
            print("\n\n".join(tables))
        elif options.coverage is not None:
            print(coverage.describe())
        elif options.axis is not None:
            print(printing.axis_listing(options.axis))
        elif options.name is None:
            print(f"{printing.survey_table()}\n\n{printing.mixture_table()}")
        else:
            print(describe_preset(options.name))


def describe_preset(name: str) -> str:
    """Describe one preset or JSON file: configuration, costs, and its rows of the tables.

    Raises:
        ValueError: There is no such preset, or the file has no configuration.
    """
    if name.endswith(".json"):
        config = c.from_json(c.TransformerConfig, Path(name).read_bytes())
    else:
        config = get(name)
    tables: list[SurveyRow | MixtureRow] = [*survey(), *mixtures()]
    rows = [row for row in tables if name in row.presets]
    parts = [
        f"{name}\n{'=' * len(name)}",
        python_source(config, defaults=False, width=80),
        _describe_costs(config),
        *map(describe_row, rows),
    ]
    return "\n\n".join(parts)


def _describe_costs(config: c.TransformerConfig) -> str:
    total, active = costs.num_parameters(config), costs.num_active_parameters(config)
    length = min(MAX_LENGTH, config.max_length or MAX_LENGTH)
    has_encoder = isinstance(config.topology, c.EncoderDecoder)
    flops = costs.forward_flops(config, length, length if has_encoder else 0) / length
    lines = [f"parameters              {total:,} ({_with_unit(total, 'MB')})"]
    if active != total:
        lines.append(f"  used by one token     {active:,} ({_with_unit(active, 'MB')})")
    setting = f"a sequence of {length:,} tokens" + (" and as long a source" if has_encoder else "")
    lines.append(f"forward FLOPs per token {flops:,.0f} ({_with_unit(flops, 'MGT')}), in {setting}")
    lines.append(f"KV cache per token      {_describe_cache(config)}")
    return "\n".join(lines)


def _describe_cache(config: c.TransformerConfig) -> str:
    layers = config.layers
    kinds = (layer.attention.parts for layer in layers)
    num_recurrent = sum(not all(part.has_scores for part in parts) for parts in kinds)
    first_bytes = costs.cache_bytes(config, 1)
    bytes_per_token = costs.cache_bytes(config, 2) - first_bytes if num_recurrent else first_bytes
    text = f"{bytes_per_token:,} bytes ({bytes_per_token / 1024:,.1f} KiB) in bfloat16"
    if num_recurrent:
        state_bytes = first_bytes - bytes_per_token
        text += f"\n{'':24}and {state_bytes:,} bytes for any number of tokens: {num_recurrent} of "
        text += f"{len(layers)} layers are recurrent"
    windows = [layer.window if layer.attention.main.has_scores else None for layer in layers]
    widths = sorted({window for window in windows if isinstance(window, int)})
    for width in widths:
        extra_bytes = costs.cache_bytes(config, width + 1) - costs.cache_bytes(config, width)
        count = windows.count(width)
        text += (
            f"\n{'':24}beyond {width:,} tokens {extra_bytes:,} bytes: {count} of {len(windows)} "
        )
        text += "layers have a window"
    if isinstance(config.topology, c.EncoderDecoder):
        text += ", without cross-attention"
    if isinstance(config.embedding.positions, c.Learned):
        text += f"; at most {config.max_length:,} tokens"
    return text


def _with_unit(number: int | float, letters: str) -> str:
    """Format a number in units of a million, with one letter per factor of 1000."""
    power = max(i for i in range(len(letters)) if number >= 1e6 * 1000**i or i == 0)
    return f"{number / (1e6 * 1000**power):,.2f} {letters[power]}"


if __name__ == "__main__":
    main()
