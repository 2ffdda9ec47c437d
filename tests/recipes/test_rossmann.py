"""Rossmann's tables: the published files and the generated tables give the same 22 categories and 16 numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from lowp.errors import InvalidInput
from lowp.recipes.recipe import TensorExamples
from lowp.recipes.rossmann import CATEGORIES, NUMBERS, drawn_tables, evaluate, read_tables, sales_data

DAYS = np.arange(np.datetime64("2015-04-01"), np.datetime64("2015-06-10"))
STORE_CSV = """"Store","StoreType","Assortment","CompetitionDistance","CompetitionOpenSinceMonth",\
"CompetitionOpenSinceYear","Promo2","Promo2SinceWeek","Promo2SinceYear","PromoInterval"
1,"c","a",1270,9,2014,0,,,""
2,"a","b",,,,1,13,2010,"Jan,Apr,Jul,Oct"
"""


def train_csv() -> str:
    rows = ['"Store","DayOfWeek","Date","Sales","Customers","Open","Promo","StateHoliday","SchoolHoliday"']
    for day in DAYS[::-1]:  # the latest day first, as published
        holiday = "a" if str(day) == "2015-05-01" else "0"
        for store in (1, 2):
            sales = 0 if holiday == "a" else 4000 + 1000 * store
            promo = int(str(day) < "2015-04-04")
            rows.append(f'{store},1,{day},{sales},500,1,{promo},"{holiday}","0"')
    return "\n".join(rows) + "\n"


def write(folder: Path, train: str | None = None, store: str = STORE_CSV) -> None:
    (folder / "train.csv").write_text(train_csv() if train is None else train)
    (folder / "store.csv").write_text(store)


def tensors(examples: object) -> dict[str, torch.Tensor]:
    assert isinstance(examples, TensorExamples)
    categories, numbers, target = examples.tensors
    columns = {name: categories[:, place] for place, name in enumerate(CATEGORIES)}
    return {**columns, **{f"{name}.": numbers[:, place] for place, name in enumerate(NUMBERS)}, "target": target}


def test_the_published_files_give_the_features_of_each_day_with_sales(tmp_path: Path) -> None:
    write(tmp_path)
    data = sales_data(read_tables(tmp_path))
    assert data.description == f"Rossmann's sales from {tmp_path}: 56 rows to train on, 82 held back"
    columns = tensors(data.training)
    first = {name: int(columns[name][0]) for name in CATEGORIES}  # the first shop on Wednesday, 1 April 2015
    assert {name: value for name, value in first.items() if value} == {
        "DayOfWeek": 2,
        "Year": 2,
        "Month": 3,
        "CompetitionMonthsOpen": 7,  # since September 2014
        "StoreType": 2,
        "CompetitionOpenSinceYear": 21,
        "Week": 12,
        "Promo_fw": 3,
        "Promo_bw": 1,
    }
    second = {name: int(columns[name][-1]) for name in ("Store", "Promo2Weeks", "PromoInterval", "Assortment")}
    assert second == {"Store": 1, "Promo2Weeks": 25, "PromoInterval": 1, "Assortment": 1}
    assert columns["target"].exp().round().unique().tolist() == [5000, 6000]


def test_days_to_and_since_a_holiday_are_counted_for_each_shop(tmp_path: Path) -> None:
    write(tmp_path)
    columns = tensors(sales_data(read_tables(tmp_path)).training)
    before = columns["BeforeStateHoliday."]
    shop = before[columns["Store"] == 0]
    # From 30 days on 1 April to 3 days on 28 April; standardised, the steps between days are equal.
    assert shop.diff().allclose(shop[1] - shop[0], atol=1e-5) and shop[0] > shop[27]


def test_behind_a_holiday_and_before_it_days_are_counted_up_to_60(tmp_path: Path) -> None:
    write(tmp_path)
    data = sales_data(read_tables(tmp_path))
    columns = tensors(data.validation)  # 29 and 30 April, then 2 May to 9 June
    trained = np.arange(30, 2, -1)  # the days before the holiday, by which they are standardised
    for shop in range(2):
        rows = columns["Store"] == shop
        since = columns["AfterStateHoliday."][rows].double() * 1e-6 + 60  # 60 in every row of the training
        until = columns["BeforeStateHoliday."][rows].double() * trained.std() + trained.mean()
        assert since.round(decimals=3).tolist() == [60, 60, *range(1, 40)]
        assert until.round(decimals=3).tolist() == [2, 1, *[60] * 39]


def test_features_stay_within_their_categories_and_numbers_are_standardised() -> None:
    data = sales_data(drawn_tables(30, 200))
    columns = tensors(data.training)
    for name, (count, _) in CATEGORIES.items():
        assert 0 <= columns[name].min() and columns[name].max() < count, name
    assert columns["CompetitionDistance."].mean().abs() < 1e-4
    assert not columns["CloudCover."].any()
    assert len(data.validation) > 30 * 30


def test_the_drawn_sales_have_the_statistics_of_the_real_ones() -> None:
    daily = drawn_tables(200, 300).daily
    sold = daily["Sales"][daily["Sales"] > 0]
    assert 5500 < np.median(sold) < 7500 and 2000 < sold.std() < 4500
    assert 0.33 < daily["Promo"].mean() < 0.4 and 0.75 < (daily["Sales"] > 0).mean() < 0.87
    assert np.array_equal(daily["Sales"], drawn_tables(200, 300).daily["Sales"])


def test_the_drawn_shops_have_the_statistics_of_the_real_ones() -> None:
    shops = drawn_tables(4000, 1).shops
    assert np.bincount(shops["StoreType"]) / 4000 == pytest.approx([0.54, 0.02, 0.13, 0.31], abs=0.03)
    assert np.bincount(shops["Assortment"]) / 4000 == pytest.approx([0.53, 0.01, 0.46], abs=0.03)
    distance, joined = shops["CompetitionDistance"], shops["Promo2"] == 1
    assert np.quantile(distance, [0.25, 0.5, 0.75]) == pytest.approx([1000, 2330, 5400], rel=0.1)
    assert joined.mean() == pytest.approx(0.51, abs=0.03) and (distance % 10 == 0).all()
    for name, lowest, highest in (("Promo2SinceYear", 2009, 2015), ("Promo2SinceWeek", 1, 50), ("PromoInterval", 1, 3)):
        assert (shops[name][~joined] == 0).all()
        assert (shops[name][joined].min(), shops[name][joined].max()) == (lowest, highest)
    months, years = shops["CompetitionOpenSinceMonth"], shops["CompetitionOpenSinceYear"]
    unknown = years == 0
    assert unknown.mean() == pytest.approx(0.32, abs=0.03) and ((months == 0) == unknown).all()
    assert (years[~unknown].min(), years.max(), months[~unknown].min(), months.max()) == (1995, 2015, 1, 12)


def test_a_promotion_runs_on_the_working_days_of_every_second_week_the_last_among_them() -> None:
    daily = drawn_tables(2, 28).daily  # four weeks, which begin on a Saturday and end on Friday, 31 July 2015
    week = [0, 0, 1, 1, 1, 1, 1]
    assert daily["Promo"].tolist() == [*[0] * 7, *week, *[0] * 7, *week] * 2
    assert daily["SchoolHoliday"].tolist() == [0, 0, 1, 1, 1, 1, 1] * 8  # in July
    assert (daily["Sales"] == 0).tolist() == [False, True, *[False] * 5] * 8  # on Sundays


BROKEN: dict[str, tuple[dict[str, str], str]] = {
    "no column": ({"train": "Store,Date\n1,2015-01-01\n"}, r"train\.csv has no column Sales, Promo, StateHoliday"),
    "empty": ({"train": ""}, "has no column Store, .*; it has nothing"),
    "cut line": ({"train": train_csv() + "1,2"}, "has 9 columns, but line 142 has a different number"),
    "no number": (
        {"train": train_csv().replace(",5000,", ",many,", 1)},
        "a value in Sales that is not a number: .*many",
    ),
    "infinite": ({"store": STORE_CSV.replace("1270", "inf")}, "a value in CompetitionDistance that is not finite"),
    "no date": ({"train": train_csv().replace("2015-04-02", "yesterday")}, "has an invalid date: .*yesterday"),
    "letter": ({"store": STORE_CSV.replace('"c"', '"x"')}, "has 'x' in StoreType, which allows 'a', 'b', 'c', 'd'"),
    "shop": ({"train": train_csv() + '7,1,2015-04-01,1,1,1,0,"0","0"'}, r"names shops that are not in store\.csv"),
    "order": ({"store": STORE_CSV.replace("2,", "5,", 1)}, "does not number its shops 1, 2, 3"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named_with_what_is_wrong_with_it(case: str, tmp_path: Path) -> None:
    files, text = BROKEN[case]
    write(tmp_path, **files)
    with pytest.raises(InvalidInput, match=rf"Rossmann store sales: .*{text}.* Get it again from https"):
        read_tables(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "store.csv").unlink()
    with pytest.raises(InvalidInput, match=r"looked for store\.csv in .*; it holds train\.csv\. Get it from https"):
        read_tables(tmp_path)


def test_tables_of_less_than_six_weeks_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="has no sales in, or none before, its last 42 days"):
        sales_data(drawn_tables(3, 40))


def test_the_effects_on_the_drawn_sales_are_found_again_by_least_squares() -> None:
    daily, shops = (tables := drawn_tables(120, 720, seed=3)).daily, tables.shops
    date = daily["Date"].astype("datetime64[D]")
    month = date.astype("datetime64[M]").astype(int) % 12
    weekday = (date.astype(int) + 3) % 7
    sold = daily["Sales"] > 0
    days = {str(day)[5:] for day in date[daily["StateHoliday"] == 1]}
    assert days == {"01-01", "05-01", "10-03", "12-25", "12-26"}
    assert ((weekday == 6) | (daily["StateHoliday"] == 1) == ~sold).all()
    assert not daily["SchoolHoliday"][weekday > 4].any()
    summer = np.isin(month, [6, 7]) & (weekday < 5)
    assert daily["SchoolHoliday"][summer].all()
    assert daily["SchoolHoliday"][~summer & (weekday < 5)].mean() == pytest.approx(0.05, abs=0.01)
    columns = [weekday == day for day in range(1, 6)] + [month == place for place in range(12) if place != 6]
    columns += [daily["Promo"], daily["SchoolHoliday"]]
    wide = np.stack([*map(np.float64, columns), np.log(np.maximum(daily["Sales"], 1))], 1)[sold]
    for shop in shops["Store"]:  # each has a level of its own
        wide[daily["Store"][sold] == shop] -= wide[daily["Store"][sold] == shop].mean(0)
    found = np.linalg.lstsq(wide[:, :-1], wide[:, -1], rcond=None)[0]
    by_weekday = np.array([0.02, -0.02, -0.01, 0.04, -0.1]) - 0.12
    by_month = [-0.06, -0.03, 0.0, 0.02, 0.01, 0.02, -0.02, -0.04, -0.02, 0.05, 0.25]  # beside July's
    assert found == pytest.approx([*by_weekday, *by_month, 0.3, 0.04], abs=0.02)
    rest = wide[:, -1] - wide[:, :-1] @ found
    assert 0.1 < rest.std() < 0.12  # and the promotion's effect of each shop


def test_the_relative_error_of_sales_is_that_of_the_competition() -> None:
    def batch(*ratios: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        target = torch.arange(float(len(ratios)))
        return target + torch.tensor(ratios).log(), target, target

    model = cast(torch.nn.Module, lambda categories, numbers: categories)
    found = evaluate(model, [batch(1.1, 0.8), batch(1.0)])
    assert found["rmspe"] == pytest.approx(((0.01 + 0.04) / 3) ** 0.5, rel=1e-4)
    assert found["loss"] == pytest.approx((math.log(1.1) ** 2 + math.log(0.8) ** 2) / 3, rel=1e-4)


@pytest.mark.parametrize(("shops", "is_allowed"), [(1115, True), (1116, False)])
def test_there_are_as_many_shops_as_the_network_embeds(tmp_path: Path, shops: int, is_allowed: bool) -> None:
    head, _, row = STORE_CSV.splitlines()
    rows = [f"{shop},{row.partition(',')[2]}" for shop in range(shops, 0, -1)]
    write(tmp_path, store="\n".join([head, *rows]) + "\n")
    if is_allowed:
        tables = read_tables(tmp_path)
        assert tables.shops["Store"].tolist() == list(range(1, shops + 1))
        return
    with pytest.raises(InvalidInput, match=r"store\.csv does not number its shops 1, 2, 3 … up to 1115 at most"):
        read_tables(tmp_path)


def test_shops_of_every_day_are_among_those_of_the_table(tmp_path: Path) -> None:
    for shop, is_allowed in ((0, False), (1, True), (2, True), (3, False)):
        write(tmp_path, train=train_csv() + f'{shop},1,2015-06-09,5,5,1,0,"0","0"\n')
        if is_allowed:
            assert read_tables(tmp_path).daily["Store"][-1] == shop
            continue
        with pytest.raises(InvalidInput, match=r"train\.csv names shops that are not in store\.csv"):
            read_tables(tmp_path)


def test_a_day_with_sales_of_one_has_a_logarithm_of_zero(tmp_path: Path) -> None:
    write(tmp_path, train=train_csv().replace(",5000,", ",1,", 1))
    data = sales_data(read_tables(tmp_path))
    assert sorted(tensors(data.validation)["target"].exp().tolist())[:2] == pytest.approx([1.0, 5000.0])
