"""A feed-forward network on a shop's daily sales: 22 embedded categories and 16 numbers.

Embeddings are looked up in fp32 and concatenated with the normalised numbers; the linear layers run in low precision.
It is an example of a network with little arithmetic: the published run on a V100 was 7 % slower in mixed precision,
since the casts cost more time than the products save. (The program of that measurement reshapes the embeddings such
that rows of a batch are mixed; here they are not.) The features are those of the usual solution (Guo and Berkhahn 2016,
arXiv 1604.06737, third place of the competition, as prepared in fast.ai's course). Columns from tables that the
competition did not publish (the shop's state, weather, search trends) are zero.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lowp.recipes.data.files import Published, read_columns
from lowp.recipes.recipe import Data, Metric, Recipe, Size, TensorExamples, adam, one_cycle


# -- the network -------------------------------------------------------------------------------------------------------
class SalesNetwork(nn.Module):
    """A network from categories int64 [N, 22] and numbers float [N, 16] to the logarithm of sales [N].

    With hidden layers of 1000 and 500 it has 811,618 parameters: 91,585 in the embeddings, 32 in the normalisation of
    the numbers, 720,001 in the linear layers and their normalisations.
    """

    def __init__(self, hidden: Sequence[int]) -> None:
        super().__init__()
        self.embed = nn.ModuleList(nn.Embedding(count, length) for count, length in CATEGORIES.values())
        self.drop = nn.Dropout(0.04)
        self.normalise = nn.BatchNorm1d(len(NUMBERS))
        first, second = hidden
        self.layers = nn.Sequential(
            nn.Linear(sum(length for _, length in CATEGORIES.values()) + len(NUMBERS), first),
            nn.ReLU(),
            nn.BatchNorm1d(first),
            nn.Dropout(0.001),
            nn.Linear(first, second),
            nn.ReLU(),
            nn.BatchNorm1d(second),
            nn.Dropout(0.01),
        )
        self.output = nn.Linear(second, 1)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        """Return the logarithm of sales, float [N]."""
        vectors = [embed(categories[:, index]) for index, embed in enumerate(self.embed)]
        features = torch.cat([self.drop(torch.cat(vectors, dim=1)), self.normalise(numbers)], dim=1)
        output: Tensor = self.output(self.layers(features)).squeeze(1)
        return output


# -- data --------------------------------------------------------------------------------------------------------------
SALES = Published("Rossmann store sales", "https://www.kaggle.com/c/rossmann-store-sales/data (train.csv, store.csv)")

# The columns of categories: the number of categories of each, and the length of its embedding; their sum is 199.
CATEGORIES: dict[str, tuple[int, int]] = {
    "Store": (1115, 80),
    "DayOfWeek": (7, 4),
    "Year": (3, 3),
    "Month": (12, 6),
    "Day": (31, 10),
    "StateHoliday": (2, 2),
    "CompetitionMonthsOpen": (25, 10),
    "Promo2Weeks": (26, 10),
    "StoreType": (4, 3),
    "Assortment": (3, 3),
    "PromoInterval": (4, 3),
    "CompetitionOpenSinceYear": (23, 9),
    "Promo2SinceYear": (8, 4),
    "State": (12, 6),
    "Week": (52, 15),
    "Events": (22, 9),
    "Promo_fw": (6, 4),
    "Promo_bw": (6, 4),
    "StateHoliday_fw": (3, 3),
    "StateHoliday_bw": (3, 3),
    "SchoolHoliday_fw": (8, 4),
    "SchoolHoliday_bw": (8, 4),
}
NUMBERS: tuple[str, ...] = (
    "CompetitionDistance",
    *(f"{statistic}_TemperatureC" for statistic in ("Max", "Mean", "Min")),
    *(f"{statistic}_Humidity" for statistic in ("Max", "Mean", "Min")),
    *(f"{statistic}_Wind_SpeedKm_h" for statistic in ("Max", "Mean")),
    "CloudCover",
    "trend",
    "trend_DE",
    "AfterStateHoliday",
    "BeforeStateHoliday",
    "Promo",
    "SchoolHoliday",
)
_INTERVALS = ("", "Jan,Apr,Jul,Oct", "Feb,May,Aug,Nov", "Mar,Jun,Sept,Dec")
_DAY = np.timedelta64(1, "D")
_HELD_DAYS = 42  # the competition asked for six weeks
_MAX_DAYS = 60  # limit of the days since and until a holiday, also used without one

Column = npt.NDArray[Any]


@dataclass(frozen=True)
class Tables:
    """The two published tables as columns: one row per shop and day, and one row per shop, numbered from 1 in order.

    Daily: Store, Date (datetime64[D]), Sales, Promo, StateHoliday (0 or 1), SchoolHoliday. Shops: StoreType and
    Assortment (0, 1 …), CompetitionDistance in metres, CompetitionOpenSinceMonth and -Year, Promo2, Promo2SinceWeek and
    -Year, PromoInterval (0 to 3). Missing values are 0.
    """

    daily: dict[str, Column]
    shops: dict[str, Column]
    source: str


# -- the published files ----------------------------------------------------------------------------------------------
def read_tables(path: Path) -> Tables:
    """Read train.csv and store.csv from a folder; raise InvalidInput for missing files, columns and values."""
    daily_file, shops_file = (SALES.find(path, [name]) for name in ("train.csv", "store.csv"))
    names = ("Store", "Date", "Sales", "Promo", "StateHoliday", "SchoolHoliday")
    shop_names = (*_SHOP_NUMBERS, "StoreType", "Assortment", "PromoInterval")
    daily, shops = (
        dict(zip(wanted, read_columns(SALES, file, wanted)[1:], strict=True))
        for file, wanted in ((daily_file, names), (shops_file, shop_names))
    )
    for file, table in ((daily_file, daily), (shops_file, shops)):
        if not table["Store"]:
            raise SALES.broken(file, "has no rows")
    order = np.argsort(_numbers(shops_file, "Store", shops["Store"]))
    shop_columns = {name: _numbers(shops_file, name, shops[name])[order] for name in _SHOP_NUMBERS}
    for name, letters in (("StoreType", "abcd"), ("Assortment", "abc")):
        shop_columns[name] = _indices(shops_file, name, shops[name], tuple(letters))[order]
    shop_columns["PromoInterval"] = _indices(shops_file, "PromoInterval", shops["PromoInterval"], _INTERVALS)[order]
    if not np.array_equal(shop_columns["Store"], np.arange(1, len(order) + 1)) or len(order) > 1115:
        raise SALES.broken(shops_file, "does not number its shops 1, 2, 3 … up to 1115 at most")
    daily_columns: dict[str, Column] = {
        name: _numbers(daily_file, name, daily[name]).astype(int)
        for name in ("Store", "Sales", "Promo", "SchoolHoliday")
    }
    if daily_columns["Store"].min() < 1 or daily_columns["Store"].max() > len(order):
        raise SALES.broken(daily_file, f"names shops that are not in {shops_file.name}")
    daily_columns["StateHoliday"] = np.array([value not in ("", "0") for value in daily["StateHoliday"]]).astype(int)
    try:
        daily_columns["Date"] = np.array(daily["Date"], dtype="datetime64[D]")
    except ValueError as error:
        raise SALES.broken(daily_file, f"has an invalid date: {error}") from None
    return Tables(daily_columns, shop_columns, f"Rossmann's sales from {daily_file.parent}")


_SHOP_NUMBERS = (
    "Store CompetitionDistance CompetitionOpenSinceMonth CompetitionOpenSinceYear Promo2 Promo2SinceWeek "
    "Promo2SinceYear"
).split()


def _numbers(path: Path, name: str, values: Sequence[str]) -> Column:
    """Return the values as floats, 0 for empty ones."""
    try:
        numbers = np.array([float(value) if value else 0.0 for value in values])
    except ValueError as error:
        raise SALES.broken(path, f"has a value in {name} that is not a number: {error}") from None
    if not np.isfinite(numbers).all():
        raise SALES.broken(path, f"has a value in {name} that is not finite")
    return numbers


def _indices(path: Path, name: str, values: Sequence[str], allowed: tuple[str, ...]) -> Column:
    """Return the index of each value in `allowed`."""
    unknown = sorted(set(values) - set(allowed))
    if unknown:
        raise SALES.broken(path, f"has {unknown[0]!r} in {name}, which allows {', '.join(map(repr, allowed))}")
    return np.array([allowed.index(value) for value in values])


# -- drawn tables -----------------------------------------------------------------------------------------------------
def drawn_tables(shops: int, days: int, seed: int = 0) -> Tables:
    """Draw the sales of `shops` shops on `days` days up to 31 July 2015, with the statistics of the published tables.

    54, 2, 13 and 31 % of the shops are of type a to d; the median distance to a competitor is 2.3 km; half of the shops
    run the long promotion; there is a promotion in every second working week; shops are closed on Sundays and holidays.
    The logarithm of sales (median about 6,400) is the sum of effects of shop, weekday, month and promotion, and noise
    with a standard deviation of 0.1.
    """
    random = np.random.default_rng(seed)
    since = np.where(random.random(shops) < 0.32, 0, random.integers(1995, 2016, shops))
    promo2 = (random.random(shops) < 0.51).astype(int)
    shop: dict[str, Column] = {
        "Store": np.arange(1, shops + 1),
        "StoreType": random.choice(4, shops, p=[0.54, 0.02, 0.13, 0.31]),
        "Assortment": random.choice(3, shops, p=[0.53, 0.01, 0.46]),
        "CompetitionDistance": np.round(2330 * np.exp(1.25 * random.standard_normal(shops)), -1),
        "CompetitionOpenSinceYear": since,
        "CompetitionOpenSinceMonth": np.where(since > 0, random.integers(1, 13, shops), 0),
        "Promo2": promo2,
        "Promo2SinceYear": promo2 * random.integers(2009, 2016, shops),
        "Promo2SinceWeek": promo2 * random.integers(1, 51, shops),
        "PromoInterval": promo2 * random.choice([1, 2, 3], shops, p=[0.59, 0.22, 0.19]),
    }
    dates = np.datetime64("2015-07-31") - np.arange(days)[::-1] * _DAY
    store = np.repeat(shop["Store"], days)
    date = np.tile(dates, shops)
    weekday, _, month, day = _calendar(date)[:4]
    holiday = np.isin(month * 100 + day, [101, 501, 1003, 1225, 1226]).astype(int)
    working_week = (date.astype(int) + 3) // 7
    promo = ((weekday < 5) & (working_week % 2 == 0)).astype(int)
    school = (np.isin(month, [7, 8]) | (random.random(len(store)) < 0.05)).astype(int) * (weekday < 5)
    effect = (
        (8.65 + 0.35 * random.standard_normal(shops))[store - 1]
        + np.array([0.12, 0.02, -0.02, -0.01, 0.04, -0.1, 0.0])[weekday]
        + np.array([-0.06, -0.03, 0.0, 0.02, 0.01, 0.02, 0.0, -0.02, -0.04, -0.02, 0.05, 0.25])[month - 1]
        + (0.3 + 0.08 * random.standard_normal(shops))[store - 1] * promo
        + np.array([0.0, 0.3, 0.0, -0.02])[shop["StoreType"]][store - 1]
        + 0.04 * school
        + 0.1 * random.standard_normal(len(store))
    )
    closed = (weekday == 6) | (holiday == 1)
    daily = {
        "Store": store,
        "Date": date,
        "Sales": np.where(closed, 0, np.round(np.exp(effect))).astype(int),
        "Promo": promo,
        "StateHoliday": holiday,
        "SchoolHoliday": school,
    }
    return Tables(daily, shop, f"sales drawn for {shops:,} shops on {days} days")


# -- features ---------------------------------------------------------------------------------------------------------
def sales_data(tables: Tables) -> Data:
    """Return examples ``(categories int64 [N, 22], numbers float32 [N, 16], log of sales float32 [N])``.

    Days without sales are dropped, and the last six weeks are for validation. Numbers are standardised with the mean
    and the standard deviation of the training rows.
    """
    daily, shops = tables.daily, tables.shops
    order = np.lexsort((daily["Date"], daily["Store"]))
    daily = {name: column[order] for name, column in daily.items()}
    shop = {name: column[daily["Store"] - 1] for name, column in shops.items()}
    categories, numbers = _features(daily, shop)
    sold = daily["Sales"] > 0
    held = daily["Date"] > daily["Date"].max() - _HELD_DAYS * _DAY
    if not (sold & held).any() or not (sold & ~held).any():
        raise SALES.broken(Path(tables.source), f"has no sales in, or none before, its last {_HELD_DAYS} days")
    fitted = numbers[sold & ~held]
    scaled = (numbers - fitted.mean(0)) / np.maximum(fitted.std(0), 1e-6)
    target = np.log(np.maximum(daily["Sales"], 1))
    parts = [
        TensorExamples(
            torch.from_numpy(categories[rows]),
            torch.from_numpy(scaled[rows].astype(np.float32)),
            torch.from_numpy(target[rows].astype(np.float32)),
        )
        for rows in (sold & ~held, sold & held)
    ]
    return Data(parts[0], parts[1], f"{tables.source}: {len(parts[0]):,} rows to train on, {len(parts[1]):,} held back")


def _features(daily: dict[str, Column], shop: dict[str, Column]) -> tuple[Column, Column]:
    weekday, year, month, day, week = _calendar(daily["Date"])
    opened = (year - shop["CompetitionOpenSinceYear"]) * 12 + month - shop["CompetitionOpenSinceMonth"]
    promo2_weeks = (year - shop["Promo2SinceYear"]) * 52 + week - shop["Promo2SinceWeek"]
    after, before = _days_to_holiday(daily)
    known: dict[str, Column] = {
        "Store": daily["Store"] - 1,
        "DayOfWeek": weekday,
        "Year": year - 2013,
        "Month": month - 1,
        "Day": day - 1,
        "StateHoliday": daily["StateHoliday"],
        "CompetitionMonthsOpen": np.where(shop["CompetitionOpenSinceYear"] > 0, opened, 0),
        "Promo2Weeks": np.where(shop["Promo2SinceYear"] > 0, promo2_weeks, 0),
        "StoreType": shop["StoreType"],
        "Assortment": shop["Assortment"],
        "PromoInterval": shop["PromoInterval"],
        "CompetitionOpenSinceYear": shop["CompetitionOpenSinceYear"] - 1993,
        "Promo2SinceYear": shop["Promo2SinceYear"] - 2008,
        "Week": week - 1,
        **_sums_of_a_week(daily),
        "CompetitionDistance": shop["CompetitionDistance"],
        "AfterStateHoliday": after,
        "BeforeStateHoliday": before,
        "Promo": daily["Promo"],
        "SchoolHoliday": daily["SchoolHoliday"],
    }
    absent = np.zeros(len(weekday))
    categories = [known.get(name, absent).clip(0, count - 1) for name, (count, _) in CATEGORIES.items()]
    return np.stack(categories, 1).astype(np.int64), np.stack([known.get(name, absent) for name in NUMBERS], 1)


def _calendar(date: Column) -> tuple[Column, Column, Column, Column, Column]:
    """Return weekday (0 is Monday), year, month, day, and week (1 to 53, seven days from the first of January)."""
    weekday = (date.astype("datetime64[D]").astype(int) + 3) % 7
    year = date.astype("datetime64[Y]").astype(int) + 1970
    month = date.astype("datetime64[M]").astype(int) % 12 + 1
    day = (date - date.astype("datetime64[M]")).astype(int) + 1
    week = (date - date.astype("datetime64[Y]")).astype(int) // 7 + 1
    return weekday, year, month, day, week


def _sums_of_a_week(daily: dict[str, Column]) -> dict[str, Column]:
    """Count a shop's rows with a promotion or a holiday among the seven up to a day (_bw) and from it on (_fw)."""
    sums = {}
    for name in ("Promo", "StateHoliday", "SchoolHoliday"):
        running = np.concatenate([[0], np.cumsum(daily[name])])
        index = np.arange(len(daily[name]))
        first, last = _bounds_of_shop(daily["Store"])
        sums[f"{name}_bw"] = running[index + 1] - running[np.maximum(index - 6, first)]
        sums[f"{name}_fw"] = running[np.minimum(index + 7, last)] - running[index]
    return sums


def _days_to_holiday(daily: dict[str, Column]) -> tuple[Column, Column]:
    """Return the days since the shop's last state holiday and until its next one, at most 60."""
    first, last = _bounds_of_shop(daily["Store"])
    days = daily["Date"].astype(int)
    holidays = np.flatnonzero(daily["StateHoliday"])
    index = np.arange(len(days))
    before, after = np.searchsorted(holidays, index, side="right") - 1, np.searchsorted(holidays, index)
    padded = np.concatenate([holidays, [-1]])  # -1: no holiday on this side
    previous, following = padded[before], padded[np.minimum(after, len(holidays))]
    since = np.where((previous >= first) & (before >= 0), days - days[previous], _MAX_DAYS)
    until = np.where((following >= 0) & (following < last), days[following] - days, _MAX_DAYS)
    return since.clip(0, _MAX_DAYS), until.clip(0, _MAX_DAYS)


def _bounds_of_shop(store: Column) -> tuple[Column, Column]:
    """Return, for each row, the index of its shop's first row and one more than that of its last; rows are by shop."""
    counts = np.bincount(store)
    ends = np.cumsum(counts)
    return (ends - counts)[store], ends[store]


# -- the recipe --------------------------------------------------------------------------------------------------------
def load(size: Size, path: Path | None) -> Data:
    """Return the competition's tables if a path is given, otherwise tables drawn with their statistics."""
    return sales_data(read_tables(path) if path is not None else drawn_tables(*size.options["drawn"]))


def make_model(size: Size) -> nn.Module:
    """Return a network with torch's initialisation, small initial embeddings, and an output bias of 8.8.

    8.8 is about the mean logarithm of sales; with a bias of 0 the first epochs only learn this constant.
    """
    network = SalesNetwork(size.options["hidden"])
    for embed in network.embed:
        for vectors in embed.parameters():
            nn.init.normal_(vectors, std=0.05)
    nn.init.constant_(network.output.bias, 8.8)
    return network


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Compute the mean squared error of the logarithm of sales."""
    categories, numbers, target = batch
    return nn.functional.mse_loss(model(categories, numbers).float(), target)


def evaluate(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Return ``rmspe``, the root mean square relative error of sales (the metric of the competition), and ``loss``."""
    relative_squares = squares = 0.0
    count = 0
    for categories, numbers, target in batches:
        error = model(categories, numbers).float() - target
        squares += float(error.square().sum())
        relative_squares += float(error.exp().sub(1).square().sum())
        count += len(target)
    return {"rmspe": (relative_squares / count) ** 0.5, "loss": squares / count}


ROSSMANN = Recipe(
    name="rossmann",
    summary="feed-forward network with embeddings: a shop's daily sales",
    source="Guo and Berkhahn 2016, arXiv 1604.06737; sizes as in A. Bilogur's guide to mixed precision, 2020",
    data="generated with the statistics of the real tables; --data DIR: Rossmann store sales (train.csv, store.csv)",
    sizes={
        "cpu": Size(10, 512, 0.01, 118_618, {"hidden": (100, 50), "drawn": (100, 300)}),
        "full": Size(20, 512, 0.003, 811_618, {"hidden": (1000, 500), "drawn": (1115, 942)}),
    },
    classes=None,
    metric=Metric("rmspe", higher_is_better=False, share=False),
    load=load,
    make_model=make_model,
    loss=loss,
    evaluate=evaluate,
    make_optimizer=adam,
    schedule=one_cycle,
)
