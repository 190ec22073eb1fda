"""Units behind a number. An answer may leave out the unit of the gold answer, or add one, but not change it."""

import re

MEASURE_NAMES = """
mm=mm,millimeter,millimetre cm=cm,centimeter,centimetre km=km,kilometer,kilometre m=m,meter,metre
in=in,inch,inches ft=ft,foot,feet yd=yd,yard mi=mi,mile
mg=mg,milligram kg=kg,kilogram g=g,gram lb=lb,lbs,pound oz=oz,ounce ton=ton,tonne
ml=ml,milliliter,millilitre l=l,liter,litre gallon=gal,gallon quart=quart,qt pint=pint,pt cup=cup
s=s,sec,second min=min,minute h=h,hr,hour day=day week=week month=month year=year,yr
degree=degree,deg radian=radian,rad percent=percent dollar=dollar,usd cent=cent euro=euro
mph=mph kmh=kmh hertz=hz,hertz newton=n,newton joule=j,joule watt=w,watt volt=v,volt
person=person,people child=child,children man=man,men woman=woman,women mouse=mouse,mice
"""
NAMES = {name: line.partition("=")[0] for line in MEASURE_NAMES.split() for name in line.partition("=")[2].split(",")}
MEASURES = frozenset(NAMES.values())
POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cubed": 3}
# Words on -s that are not the plural of a thing that is counted.
OTHER_WORDS = """
is was has does this its us as plus minus less times thousands hundreds millions billions trillions dozens tens ones
halves thirds fourths quarters fifths sixths sevenths eighths ninths tenths hundredths thousandths squares cubes roots
primes powers digits twos threes fours fives sixes sevens eights nines scores grosses doubles triples always perhaps
besides whereas negatives positives inverses reciprocals factorials logs
"""
OTHER = frozenset(OTHER_WORDS.split())
WORD = re.compile(r"[a-z]+")


def unit_name(text: str) -> str:
    """The unit in a common form: "square inches" and "in" to the power of 2 are in^2; empty for "units".

    ValueError for words that are not a unit: "5 or 6", "5 million", "5 is wrong".
    """
    names, power, joined = list[str](), 1, False
    for word in re.findall(r"[a-z]+|/|\S", text.lower().replace(".", "")):
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
    for name in (word, word.removesuffix("s")):
        if name in NAMES:
            return NAMES[name]
    if not WORD.fullmatch(word) or not word.endswith("s") or len(word) < 4 or word in OTHER:
        raise ValueError(f"{word} is not a unit")
    return word.removesuffix("s")
