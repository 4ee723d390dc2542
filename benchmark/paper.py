"""The figures of the paper's tables, as it prints them. Success in % or episodic return, and 2 standard errors."""

METAWORLD = (
    "button-press", "door-open", "drawer-open", "faucet-close", "lever-pull",
    "peg-insert-side", "plate-slide", "push-back", "sweep-into", "window-close",
)  # fmt: skip
LOCOMOTION = ("ant", "half-cheetah", "hopper", "walker2d")
METHODS = (
    "bc", "p_iql", "cpl", "cpl_kl", "preference_transformer", "ipl", "dppo", "paws_transformer", "paws_mlp",
)  # fmt: skip
STATE_UPDATES = ("paws_transformer_state", "paws_mlp_state")  # Meta-World only


def parse(text: str, methods: tuple[str, ...], n_pref: int) -> dict[tuple[str, str, int], tuple[float, float]]:
    """Lines of a task and "mean±2SE" for each method -> {(task, method, n_pref): (mean, 2 SE)}."""
    rows = [line.split() for line in text.strip().splitlines()]
    values = {(task, m, n_pref): cell.split("±") for task, *row in rows for m, cell in zip(methods, row, strict=True)}
    return {key: (float(mean), float(two_se)) for key, (mean, two_se) in values.items()}


# Tables "Meta-World", "Locomotion Tasks", "DPPO" and "Performance results for individual tasks", 10 seeds. The last one
# repeats PAWS with 50 preferences; where it differs (five cells, by at most 1, 2 SE by at most 2), this is the first.
FIGURES = {
    **parse(
        """
        button-press      69±3   72±6   70±8   67±7   71±5   66±8   15±4   80±5   82±6   74±5   72±6
        door-open         48±6   52±8   36±9  44±11   62±6   47±8   15±5   70±8  65±15   42±9  40±12
        drawer-open       54±5   58±6   53±5   56±7   45±3   44±5    9±3  44±11  40±12  31±13  22±10
        faucet-close      51±6   59±7   53±7   48±6   59±3   54±6   22±5  67±10   68±8   60±8   64±9
        lever-pull        36±7   31±5   28±8   29±8   34±3   35±4    6±1   28±5  30±12   32±9  16±11
        peg-insert-side   33±7   31±6   32±6   27±8   33±3   29±5    1±0   24±7   23±9   20±9   19±9
        plate-slide       47±5   50±4   42±5   42±7   55±3   54±8   17±5   48±6   49±9   45±8   37±6
        push-back         25±4   23±5   25±7   18±5   25±2   26±4    4±1   26±5   24±4   19±5   17±3
        sweep-into        30±6   35±5   26±9   31±6   31±2   31±5    9±2   35±8   36±9   34±5   33±6
        window-close      69±8   78±9   64±7   59±8   86±0   71±6   29±7   94±5   91±5   80±8   79±8
        """,
        (*METHODS, *STATE_UPDATES),
        50,
    ),
    **parse(
        """
        button-press      67±3   77±5   87±5   86±3   77±2   69±4   15±3   84±4   82±4   78±5   75±4
        door-open         52±3   83±3   71±9   77±6   87±2   59±4   15±6   96±1   98±1   64±8   82±4
        drawer-open       60±6   71±2   79±3   78±5   71±1   55±3   13±2   74±3   75±3   66±3   59±4
        faucet-close      66±3   80±3   64±4   63±3   85±2   67±4   32±5   87±3   87±3   73±5  71±10
        lever-pull        44±3   38±4   46±3   47±4   47±2   54±3    4±1   58±5   55±4   55±3   56±4
        peg-insert-side   48±3   78±5   68±4   67±4   80±1   49±3    1±0   81±4   82±3   55±4   68±5
        plate-slide       50±6   74±7   65±3   65±5   78±2   56±3   10±2   74±5   78±5   52±7   54±6
        push-back         37±2   43±3   45±2   43±4   48±2   38±2    3±1   56±3   53±3   36±6   44±4
        sweep-into        58±3   66±5   66±5   64±6   66±2   57±2    9±2   74±3   74±4   63±2   67±3
        window-close      91±2   97±1   85±5   83±4   96±1   94±2   35±3   98±1   99±0   91±3   91±2
        """,
        (*METHODS, *STATE_UPDATES),
        500,
    ),
    **parse(
        """
        ant                546±43    567±37    508±34    518±22    505±17    384±16   -554±28    685±22    707±26
        half-cheetah      1019±29   1029±20    998±45    998±35    945±25     690±3    -90±10   1063±26    810±93
        hopper             456±45    397±39    391±39    451±61    500±28    436±85     40±59    484±41    512±57
        walker2d           167±33    116±33    119±28    123±31    150±40    160±76     35±27    208±82    235±70
        """,
        METHODS,
        50,
    ),
    **parse(
        """
        ant                593±34    847±12    563±33     581±8    784±17    634±10   -424±22    850±10    882±16
        half-cheetah      1085±66  1031±107    950±87    948±93    968±85   1118±26    -97±14   1483±92  1450±251
        hopper             401±22    571±65    398±35    405±32    552±48    385±48     74±31    563±60    637±50
        walker2d           266±30    947±32    446±55    476±77    726±56    251±34     32±13    997±21   1023±16
        """,
        METHODS,
        500,
    ),
}
# Table "human-collected preferences": 50 comparisons of each of 10 labelers, one seed each.
HUMAN = parse(
    """
    button-press  44.7±2.4  53.2±3.7  47.5±7.4  49.0±10.1  55.2±5.6  47.8±4.2  57.2±5.6  56.2±5.6
    door-open     73.6±2.4  64.0±3.7  55.6±9.2   54.8±8.0  76.9±4.4  76.2±3.3  82.2±3.8  86.0±3.0
    """,
    tuple(method for method in METHODS if method != "dppo"),
    50,
)
# Success with a Transformer's advantages of 500 preferences and ever shorter pieces: mean of Meta-World, 5 seeds.
UPDATE_SEGMENT_LENGTH = {64: 78.2, 32: 75.8, 16: 69.9, 8: 64.3}
# Rank correlation of policy and expert within segments, Transformer, 500 preferences, tasks as in METAWORLD, 5 seeds.
SPEARMAN = {
    "paws_transformer_state": (0.06, 0.11, -0.34, 0.35, -0.1, 0.03, 0.26, 0.05, -0.04, 0.16),
    "paws_transformer": (0.36, 0.21, 0.03, 0.57, -0.26, 0.24, 0.27, 0.20, 0.00, 0.55),
}
