"""Units behind a number. An answer may leave out the unit of the gold answer, or add one, but not change it."""

import re

MEASURE_NAMES = """
mm=mm,millimeter,millimetre cm=cm,cms,centimeter,centimetre km=km,kms,kilometer,kilometre m=m,meter,metre
in=in,inch,inches ft=ft,foot,feet yd=yd,yds,yard mi=mi,mile
mg=mg,milligram kg=kg,kgs,kilogram g=g,gram lb=lb,lbs,pound oz=oz,ounce ton=ton,tonne
ml=ml,milliliter,millilitre l=l,L,liter,litre gallon=gal,gallon quart=quart,qt pint=pint,pt cup=cup
s=s,sec,second min=min,minute h=h,hr,hrs,hour day=day week=week month=month year=year,yr,yrs
degree=degree,deg radian=radian,rad percent=percent dollar=dollar,usd cent=cent euro=euro
mph=mph kmh=kmh hertz=hz,hertz newton=N,newton joule=J,joule watt=W,watt volt=V,volt
person=person,people child=child,children man=man,men woman=woman,women mouse=mouse,mice
"""
NAMES = {name: line.partition("=")[0] for line in MEASURE_NAMES.split() for name in line.partition("=")[2].split(",")}
MEASURES = frozenset(NAMES.values())
# Things that are counted, in the singular. None of them is a number or a multiplier, in any of its senses.
COUNTED_NAMES = """
unit way student apple orange banana pear lemon cherry egg cookie cake pie pizza candy sandwich boy girl adult player
team member teacher worker friend passenger customer voter guest runner game goal vote coin penny nickel dime stamp
card marble ball block brick tile book page letter word pencil pen crayon sticker toy bag jar bucket bottle barrel
bushel acre car bus train truck bike bicycle ticket seat row column chair table desk room house floor door window tree
flower plant leaf animal dog cat cow horse sheep pig chicken duck fish bird rabbit frog bee ant lion step jump hop lap
trip revolution rotation rpm song slice piece shirt sock shoe hat integer subset path route arrangement outcome
possibility choice combination permutation committee handshake diagonal vertex side edge face triangle rectangle
circle intersection region calorie puppy kitten monkey sibling brother sister point
"""
PLURALS = """
leaves=leaf vertices=vertex pennies=penny cherries=cherry candies=candy sandwiches=sandwich buses=bus boxes=box
possibilities=possibility branches=branch puppies=puppy
"""
IRREGULAR = dict(word.split("=") for word in PLURALS.split())
COUNTED = frozenset(COUNTED_NAMES.split()) | frozenset(IRREGULAR.values())
POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cubed": 3}
WORD = re.compile(r"[A-Za-z]+")


def unit_name(text: str) -> str:
    """The unit in a common form: "square inches" and "in" to the power of 2 are in^2; empty for "units".

    A word that is not known, as in "5 million" and "5 twelfths", has a question mark: its unit equals only itself.
    ValueError for words that are not a unit: "5 or 6", "5 is wrong".
    """
    names, power, joined = list[str](), 1, False
    for word in re.findall(r"[A-Za-z]+|/|\S", re.sub(r"\bper\s+cent\b", "percent", text.replace(".", ""))):
        word = word if len(word) == 1 else word.lower()  # 5 M is not 5 m
        if word in ("per", "/"):
            names.append("/")
            joined = True
        elif word in POWERS:
            power = POWERS[word]
        elif names and not joined:
            raise ValueError(f"{text} is not a unit")
        else:
            names.append(_singular(word))
            joined = False
    if not names or joined:
        raise ValueError(f"{text} is not a unit")
    name = "".join(names)
    return "" if name == "unit" else name + (f"^{power}" if power > 1 else "")


def _singular(word: str) -> str:
    plural_of = word[:-1] if word.endswith("s") and len(word) > 3 and word != "percents" else word
    for name in (word, plural_of):
        if name in NAMES:
            return NAMES[name]
        if (name := IRREGULAR.get(name, name)) in COUNTED:
            return name
    if not WORD.fullmatch(word):
        raise ValueError(f"{word} is not a unit")
    return f"{word}?"
