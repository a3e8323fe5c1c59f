"""Arithmetic word problems with worked solutions, one function a template.

A solution is a few lines, each with one equation of two numbers (`6 × 14 = 84`), the last of them the answer, and
then `Answer: 84`. Numbers are whole. A template draws its numbers so that every division comes out even and nothing
falls below zero.
"""

from __future__ import annotations

from collections.abc import Callable

from workloads.draw import Draw

_NAMES = (
    "Amara", "Bruno", "Chidi", "Dalia", "Emeka", "Farid", "Greta", "Hana", "Ivo", "Jonas", "Kaori", "Lena", "Milan",
    "Nadia", "Oskar", "Priya", "Quentin", "Rosa", "Samir", "Tilda", "Ugo", "Vera", "Wanda", "Xenia", "Yusuf", "Zoran",
    "Anouk", "Bela", "Carmen", "Dmitri", "Elif", "Fatou",
)  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

#: A template's result: the question, the lines of the solution, the answer.
Problem = tuple[str, list[str], int]


def problem(draw: Draw) -> tuple[str, str]:
    """(question, worked solution) of a template drawn evenly."""
    question, lines, answer = draw.pick(TEMPLATES)(draw)
    return question, "\n".join([*lines, f"Answer: {answer}"])


def _plus(a: int, b: int) -> tuple[int, str]:
    return a + b, f"{a} + {b} = {a + b}"


def _minus(a: int, b: int) -> tuple[int, str]:
    return a - b, f"{a} - {b} = {a - b}"


def _times(a: int, b: int) -> tuple[int, str]:
    return a * b, f"{a} × {b} = {a * b}"


def _over(a: int, b: int) -> tuple[int, str]:
    return a // b, f"{a} ÷ {b} = {a // b}"


def _shelves(draw: Draw) -> Problem:
    name = draw.pick(_NAMES)
    holders, thing = draw.pick(
        (("shelves", "books"), ("crates", "apples"), ("trays", "seedlings"), ("boxes", "candles"), ("albums", "stamps"))
    )
    a, b, c = draw.between(3, 14), draw.between(6, 30), draw.between(5, 40)
    total, first = _times(a, b)
    answer, second = _plus(total, c)
    question = draw.pick(
        (
            f"{name} fills {a} {holders} with {b} {thing} each and has {c} {thing} left over. "
            f"How many {thing} does {name} have in all?",
            f"Every one of {a} {holders} holds {b} {thing}, and {c} more {thing} lie on the floor. "
            f"How many {thing} are there?",
        )
    )
    return question, [f"The {holders} hold {first} {thing}.", f"With the rest that makes {second} {thing}."], answer


def _change(draw: Draw) -> Problem:
    name, thing = draw.pick(_NAMES), draw.pick(("notebooks", "sandwiches", "tickets", "plants", "scarves", "brushes"))
    price, count = draw.between(2, 19), draw.between(2, 9)
    cost, first = _times(count, price)
    paid = next(note for note in (20, 50, 100, 200) if note > cost)
    answer, second = _minus(paid, cost)
    question = draw.pick(
        (
            f"{name} buys {count} {thing} at {price} euros apiece and pays with a {paid} euro note. "
            "How many euros does the shop give back?",
            f"One of the {thing} costs {price} euros. {name} takes {count} and hands over {paid} euros. "
            "How much change is due, in euros?",
        )
    )
    return question, [f"The {thing} cost {first} euros.", f"The change is {second} euros."], answer


def _fleet(draw: Draw) -> Problem:
    vehicle, vehicles, load = draw.pick(
        (
            ("bus", "buses", "pupils"),
            ("van", "vans", "parcels"),
            ("boat", "boats", "guests"),
            ("lift", "lifts", "skiers"),
        )
    )
    size, trips = draw.between(8, 52), draw.between(3, 15)
    away = draw.between(3, 30)
    total = size * trips
    everyone, first = _minus(total + away, away)
    answer, second = _over(everyone, size)
    question = draw.pick(
        (
            f"{total + away} {load} are expected, but {away} do not arrive. A {vehicle} takes {size}. "
            f"How many full {vehicles} are needed for those who come?",
            f"Of {total + away} {load}, {away} are left out. The others fill {vehicles} of {size} exactly. "
            f"How many {vehicles} is that?",
        )
    )
    return question, [f"That leaves {first} {load}.", f"Split into {vehicles}: {second}."], answer


def _savings(draw: Draw) -> Problem:
    name, goal = draw.pick(_NAMES), draw.pick(("bicycle", "guitar", "tent", "sewing machine", "telescope", "drum"))
    week, weeks, have = draw.between(5, 35), draw.between(4, 20), draw.between(10, 90)
    price = week * weeks + have
    missing, first = _minus(price, have)
    answer, second = _over(missing, week)
    question = draw.pick(
        (
            f"A {goal} costs {price} dollars. {name} has {have} dollars and saves {week} more every week. "
            f"After how many weeks can {name} buy it?",
            f"{name} wants a {goal} for {price} dollars, has {have} dollars so far, and puts {week} dollars aside a "
            "week. How many weeks does it take?",
        )
    )
    return question, [f"Still missing: {first} dollars.", f"That takes {second} weeks."], answer


def _trip(draw: Draw) -> Problem:
    name, way = draw.pick(_NAMES), draw.pick(("cycles", "drives", "walks", "sails", "rides"))
    speed, hours, rest = draw.between(4, 90), draw.between(2, 8), draw.between(3, 60)
    done, first = _times(speed, hours)
    answer, second = _plus(done, rest)
    question = draw.pick(
        (
            f"{name} {way} at {speed} km an hour for {hours} hours and then has {rest} km to go. "
            "How long is the whole way in km?",
            f"After {hours} hours at {speed} km an hour, {name} still has {rest} km before the end. "
            "How many km is it altogether?",
        )
    )
    return question, [f"In {hours} hours: {first} km.", f"The whole way is {second} km."], answer


def _percent_off(draw: Draw) -> Problem:
    thing = draw.pick(("coat", "lamp", "sofa", "printer", "rug", "kettle", "saddle"))
    price, percent = draw.between(2, 40) * 20, draw.pick((5, 10, 15, 20, 25, 30, 40, 45))
    scaled, first = _times(price, percent)
    less, second = _over(scaled, 100)
    answer, third = _minus(price, less)
    question = draw.pick(
        (
            f"A {thing} priced at {price} euros is sold for {percent} % less. What does it cost now, in euros?",
            f"The shop takes {percent} % off a {thing} of {price} euros. How many euros are left to pay?",
        )
    )
    return question, [f"{percent} % of {price}: {first}, and {second} euros.", f"New price: {third} euros."], answer


def _harvest(draw: Draw) -> Problem:
    fruit = draw.pick(("pears", "plums", "lemons", "figs", "quinces", "walnuts"))
    trees, jar = draw.between(4, 16), draw.pick((2, 3, 4, 6))
    each = draw.between(3, 10) * jar
    total, first = _times(trees, each)
    answer, second = _over(total, jar)
    question = draw.pick(
        (
            f"{trees} trees bear {each} {fruit} each. A jar takes {jar} {fruit}. How many jars can be filled?",
            f"An orchard has {trees} trees with {each} {fruit} on every tree; {jar} {fruit} go into a jar. "
            "How many jars does that make?",
        )
    )
    return question, [f"Picked in all: {first} {fruit}.", f"Jars: {second}."], answer


def _pages(draw: Draw) -> Problem:
    name, rate, days = draw.pick(_NAMES), draw.between(8, 45), draw.between(3, 14)
    pages = rate * days + draw.between(10, 160)
    done, first = _times(rate, days)
    answer, second = _minus(pages, done)
    question = draw.pick(
        (
            f"{name} reads {rate} pages a day of a book of {pages} pages. How many pages are left after {days} days?",
            f"A book has {pages} pages. For {days} days {name} reads {rate} of them a day. How many remain?",
        )
    )
    return question, [f"Read so far: {first} pages.", f"Left: {second} pages."], answer


def _garden(draw: Draw) -> Problem:
    long, wide, gate = draw.between(8, 60), draw.between(4, 40), draw.between(1, 4)
    half, first = _plus(long, wide)
    round_, second = _times(half, 2)
    answer, third = _minus(round_, gate)
    place = draw.pick(("garden", "paddock", "schoolyard", "field", "vineyard"))
    question = draw.pick(
        (
            f"A {place} is {long} m long and {wide} m wide. A gate takes {gate} m of its edge. "
            "How many metres of fence go round the rest?",
            f"How many metres of fence does a {place} of {long} m by {wide} m need if {gate} m stay open for a gate?",
        )
    )
    return (
        question,
        [f"One long and one short side: {first} m.", f"All four: {second} m.", f"Fence: {third} m."],
        answer,
    )


def _wages(draw: Draw) -> Problem:
    name, hourly, hours, bonus = draw.pick(_NAMES), draw.between(11, 32), draw.between(4, 38), draw.between(5, 80)
    pay, first = _times(hourly, hours)
    answer, second = _plus(pay, bonus)
    day = draw.pick(_DAYS)
    question = draw.pick(
        (
            f"{name} earns {hourly} dollars an hour and works {hours} hours. On {day} a bonus of {bonus} dollars is "
            "added. What is the pay, in dollars?",
            f"For {hours} hours of work at {hourly} dollars an hour, plus {bonus} dollars on {day}, how many dollars "
            f"does {name} get?",
        )
    )
    return question, [f"For the hours: {first} dollars.", f"With the bonus: {second} dollars."], answer


def _minutes(draw: Draw) -> Problem:
    hours, minutes, parts = draw.between(1, 6), draw.pick((0, 12, 15, 20, 24, 30, 36, 40, 45, 48)), draw.pick((3, 4, 6))
    whole = hours * 60 + minutes
    minutes += (parts - whole % parts) % parts
    inside, first = _times(hours, 60)
    total, second = _plus(inside, minutes)
    answer, third = _over(total, parts)
    what = draw.pick(("film", "lecture", "concert", "workshop", "rehearsal"))
    question = draw.pick(
        (
            f"A {what} of {hours} hours and {minutes} minutes is cut into {parts} equal parts. "
            "How many minutes is one part?",
            f"{parts} speakers share a {what} of {hours} hours {minutes} minutes equally. "
            "How many minutes does each one have?",
        )
    )
    return (
        question,
        [f"{hours} hours are {first} minutes.", f"In all: {second} minutes.", f"One part: {third}."],
        answer,
    )


def _recipe(draw: Draw) -> Problem:
    dish, stuff = draw.pick((("bread", "flour"), ("stew", "beans"), ("cake", "sugar"), ("soup", "lentils")))
    each, base, guests = draw.between(20, 120), draw.pick((2, 4, 5, 6)), draw.between(7, 30)
    grams = each * base
    one, first = _over(grams, base)
    answer, second = _times(one, guests)
    question = draw.pick(
        (
            f"A {dish} for {base} people takes {grams} g of {stuff}. How many grams are needed for {guests} people?",
            f"With {grams} g of {stuff} a cook makes {dish} for {base}. How many grams does {dish} for {guests} take?",
        )
    )
    return question, [f"For one person: {first} g.", f"For {guests}: {second} g."], answer


def _ages(draw: Draw) -> Problem:
    name = draw.pick(_NAMES)
    other = draw.pick([n for n in _NAMES if n != name])
    age, times, years = draw.between(3, 15), draw.between(2, 5), draw.between(2, 20)
    older, first = _times(age, times)
    answer, second = _plus(older, years)
    question = draw.pick(
        (
            f"{name} is {age}. {other} is {times} times as old. How old is {other} in {years} years?",
            f"{other} is {times} times {name}'s age, and {name} is {age}. What is {other}'s age in {years} years?",
        )
    )
    return question, [f"{other} is now {first}.", f"In {years} years: {second}."], answer


def _teams(draw: Draw) -> Problem:
    girls, boys, size = draw.between(9, 60), draw.between(9, 60), draw.pick((4, 5, 6, 7, 8))
    boys += (size - (girls + boys) % size) % size
    all_, first = _plus(girls, boys)
    answer, second = _over(all_, size)
    what = draw.pick(("choir", "club", "camp", "school"))
    question = draw.pick(
        (
            f"A {what} has {girls} girls and {boys} boys. They form teams of {size}. How many teams are there?",
            f"{girls} girls and {boys} boys of a {what} are split into groups of {size}. How many groups is that?",
        )
    )
    return question, [f"Together: {first} children.", f"Groups: {second}."], answer


def _tank(draw: Draw) -> Problem:
    fill, leak, minutes = draw.between(12, 60), draw.between(1, 9), draw.between(5, 45)
    net, first = _minus(fill, leak)
    answer, second = _times(net, minutes)
    what = draw.pick(("tank", "pool", "barrel", "trough"))
    question = draw.pick(
        (
            f"{fill} litres a minute run into an empty {what}, and {leak} litres a minute leak out. "
            f"How many litres are in it after {minutes} minutes?",
            f"An empty {what} gains {fill} litres and loses {leak} litres every minute. What does it hold after "
            f"{minutes} minutes, in litres?",
        )
    )
    return question, [f"A minute brings {first} litres.", f"After {minutes} minutes: {second} litres."], answer


def _half_sold(draw: Draw) -> Problem:
    name, thing = draw.pick(_NAMES), draw.pick(("rolls", "posters", "melons", "candles", "bouquets", "jars"))
    half = draw.between(15, 120)
    start, more = 2 * half, draw.between(3, half - 2)
    left, first = _over(start, 2)
    answer, second = _minus(left, more)
    morning, later = draw.pick((("in the morning", "in the afternoon"), ("on Saturday", "on Sunday")))
    question = draw.pick(
        (
            f"{name} brings {start} {thing} to the market, sells half of them {morning} and {more} {later}. "
            f"How many {thing} are left?",
            f"Of {start} {thing}, half go {morning}; {later} {name} sells another {more}. How many remain unsold?",
        )
    )
    return question, [f"Half of them: {first}.", f"Left in the end: {second} {thing}."], answer


def _difference(draw: Draw) -> Problem:
    name = draw.pick(_NAMES)
    other = draw.pick([n for n in _NAMES if n != name])
    a, b, c, d = draw.between(8, 15), draw.between(12, 30), draw.between(2, 8), draw.between(5, 11)
    mine, first = _times(a, b)
    theirs, second = _times(c, d)
    answer, third = _minus(mine, theirs)
    thing = draw.pick(("points", "coins", "cards", "steps", "beads"))
    question = draw.pick(
        (
            f"{name} gets {a} {thing} in each of {b} rounds, {other} gets {c} in each of {d}. "
            f"How many more {thing} does {name} have?",
            f"In {b} rounds {name} collects {a} {thing} a round; {other} collects {c} a round in {d} rounds. "
            f"By how many {thing} is {name} ahead?",
        )
    )
    lines = [f"{name}: {first}.", f"{other}: {second}.", f"The difference is {third} {thing}."]
    return question, lines, answer


def _two_kinds(draw: Draw) -> Problem:
    dear, cheap = draw.pick((("adults", "children"), ("seats", "standing places"), ("huts", "tents")))
    day = draw.pick(("Friday", "Saturday", "Sunday"))
    a, p, b, q = draw.between(5, 40), draw.between(9, 25), draw.between(5, 60), draw.between(2, 8)
    first_sum, first = _times(a, p)
    second_sum, second = _times(b, q)
    answer, third = _plus(first_sum, second_sum)
    question = draw.pick(
        (
            f"On {day}, {a} {dear} at {p} euros and {b} {cheap} at {q} euros were paid for. How many euros came in?",
            f"{dear.capitalize()} cost {p} euros, {cheap} {q} euros. On {day} there were {a} and {b} of them. "
            "What were the takings in euros?",
        )
    )
    lines = [f"{dear.capitalize()}: {first}.", f"{cheap.capitalize()}: {second}.", f"Together: {third} euros."]
    return question, lines, answer


def _shared_cost(draw: Draw) -> Problem:
    people, each = draw.between(3, 12), draw.between(6, 48)
    total = people * each
    tip = draw.between(2, total // 3)
    bill = total - tip
    whole, first = _plus(bill, tip)
    answer, second = _over(whole, people)
    what = draw.pick(("dinner", "taxi", "boat hire", "present", "cottage"))
    question = draw.pick(
        (
            f"{people} friends share a {what} of {bill} euros and a tip of {tip} euros equally. "
            "How many euros does each one pay?",
            f"A {what} costs {bill} euros, and {tip} euros are added as a tip. {people} people split it evenly. "
            "What is one share in euros?",
        )
    )
    return question, [f"To pay in all: {first} euros.", f"Each share: {second} euros."], answer


def _average(draw: Draw) -> Problem:
    a, b, c = draw.between(5, 60), draw.between(5, 60), draw.between(5, 60)
    c += (3 - (a + b + c) % 3) % 3
    two, first = _plus(a, b)
    three, second = _plus(two, c)
    answer, third = _over(three, 3)
    name, what = draw.pick(_NAMES), draw.pick(("kilometres", "pages", "points", "calls", "orders", "laps"))
    days = draw.pick((("Monday", "Tuesday", "Wednesday"), ("Friday", "Saturday", "Sunday")))
    question = draw.pick(
        (
            f"{name} counts {a} {what} on {days[0]}, {b} on {days[1]} and {c} on {days[2]}. What is the daily average?",
            f"On three days {name} notes {a}, {b} and {c} {what}. How many {what} is that a day on average?",
        )
    )
    return question, [f"The first two: {first}.", f"All three: {second}.", f"Average: {third}."], answer


def _rows(draw: Draw) -> Problem:
    rows, seats = draw.between(6, 30), draw.between(8, 40)
    total, first = _times(rows, seats)
    taken = draw.between(10, total - 5)
    answer, second = _minus(total, taken)
    place = draw.pick(("hall", "cinema", "stand", "church", "tent"))
    question = draw.pick(
        (
            f"A {place} has {rows} rows of {seats} seats. {taken} seats are taken. How many are free?",
            f"{taken} people sit in a {place} with {rows} rows and {seats} seats a row. How many seats stay empty?",
        )
    )
    return question, [f"Seats: {first}.", f"Free: {second}."], answer


def _packs(draw: Draw) -> Problem:
    thing, size, packs, used = (
        draw.pick(("screws", "tiles", "tea bags", "pencils", "nails", "labels")),
        draw.pick((6, 8, 10, 12, 20, 24, 25, 50)),
        draw.between(3, 18),
        draw.between(2, 17),
    )
    total, first = _times(packs, size)
    used = min(used * 3, total - 1)
    answer, second = _minus(total, used)
    name = draw.pick(_NAMES)
    question = draw.pick(
        (
            f"{name} opens {packs} packs of {size} {thing} and uses {used}. How many {thing} are left?",
            f"A pack holds {size} {thing}. {name} has {packs} packs and needs {used} {thing}. How many will remain?",
        )
    )
    return question, [f"In the packs: {first} {thing}.", f"Left: {second}."], answer


def _growth(draw: Draw) -> Problem:
    start, weekly, weeks, cut = draw.between(5, 60), draw.between(2, 9), draw.between(3, 20), draw.between(2, 25)
    grown, first = _times(weekly, weeks)
    high, second = _plus(start, grown)
    cut = min(cut, high - 1)
    answer, third = _minus(high, cut)
    plant = draw.pick(("hedge", "vine", "bamboo", "sunflower", "ivy"))
    question = draw.pick(
        (
            f"A {plant} of {start} cm grows {weekly} cm a week for {weeks} weeks and is then cut back by {cut} cm. "
            "How many cm high is it?",
            f"For {weeks} weeks a {plant} gains {weekly} cm a week, from {start} cm on; then {cut} cm are cut off. "
            "What is its height in cm?",
        )
    )
    return question, [f"Growth: {first} cm.", f"Before the cut: {second} cm.", f"After it: {third} cm."], answer


def _exchange(draw: Draw) -> Problem:
    name, rate, amount = draw.pick(_NAMES), draw.between(2, 30), draw.between(10, 95)
    spent = draw.between(5, rate * amount - 5)
    money = draw.pick(("crowns", "pesos", "rand", "lira", "dinars"))
    total, first = _times(amount, rate)
    answer, second = _minus(total, spent)
    question = draw.pick(
        (
            f"One euro buys {rate} {money}. {name} changes {amount} euros and spends {spent} {money}. "
            f"How many {money} are left?",
            f"{name} changes {amount} euros at {rate} {money} to the euro, then pays {spent} {money} for a room. "
            f"What is left in {money}?",
        )
    )
    return question, [f"After changing: {first} {money}.", f"Left: {second} {money}."], answer


TEMPLATES: tuple[Callable[[Draw], Problem], ...] = (
    _shelves, _change, _fleet, _savings, _trip, _percent_off, _harvest, _pages, _garden, _wages, _minutes, _recipe,
    _ages, _teams, _tank, _half_sold, _difference, _two_kinds, _shared_cost, _average, _rows, _packs, _growth,
    _exchange,
)  # fmt: skip
