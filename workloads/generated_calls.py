"""Function-call exchanges: one or two functions as JSON, a request, and the call that answers it as JSON.

A function has a JSON-Schema object of its parameters; its `request` draws a sentence and the arguments that sentence
states. An argument a request leaves out is optional in the schema and absent from the call. Name, description and
order of the parameters vary from item to item, so that a schema has to be read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from workloads.draw import Draw

_OPENINGS = (
    "You can call these functions:\n{functions}\n\nRequest: {request}",
    "Functions:\n{functions}\n\nAnswer with one call as JSON.\n{request}",
    "Tools, one JSON object a line:\n{functions}\n\nUser: {request}",
)
_PEOPLE = (
    "Amara", "Bruno", "Chidi", "Dalia", "Emeka", "Greta", "Hana", "Ivo", "Kaori", "Lena", "Milan", "Nadia", "Oskar",
    "Priya", "Rosa", "Samir", "Tilda", "Vera", "Yusuf", "Zoran",
)  # fmt: skip
_CITIES = (
    "Bergen", "Porto", "Lima", "Osaka", "Nairobi", "Quito", "Turin", "Ghent", "Tampere", "Izmir", "Perth", "Accra",
    "Graz", "Hanoi", "Leeds", "Cusco", "Malmö", "Riga", "Split", "Tunis",
)  # fmt: skip
_MONTHS = ("January", "March", "April", "June", "July", "September", "October", "December")
_ROOMS = ("kitchen", "bedroom", "hall", "study", "cellar", "attic", "living room", "garage")

#: A request's result: the sentence and the arguments it states.
Request = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Function:
    """A function that can be called, under one of its `names`.

    `parameters` maps a name to its JSON Schema; those not in `optional` are required.
    """

    names: tuple[str, ...]
    description: str
    parameters: Mapping[str, Mapping[str, Any]]
    request: Callable[[Draw], Request]
    optional: tuple[str, ...] = ()

    def schema(self, draw: Draw) -> dict[str, Any]:
        """The function as a model is told of it."""
        order = draw.shuffled(list(self.parameters))
        parameters = {
            "type": "object",
            "properties": {name: dict(self.parameters[name]) for name in order},
            "required": [name for name in order if name not in self.optional],
        }
        described = {"description": self.description} if draw.chance(50) else {}
        return {"name": draw.pick(self.names), **described, "parameters": parameters}


def exchange(draw: Draw) -> tuple[str, str]:
    """(functions and request, call): a function drawn evenly; in one draw of five, another is offered beside it."""
    function = draw.pick(FUNCTIONS)
    called = function.schema(draw)
    offered = [called]
    if draw.chance(20):
        other = draw.pick([each for each in FUNCTIONS if each is not function])
        offered = draw.shuffled([called, other.schema(draw)])
    request, arguments = function.request(draw)
    functions = "\n".join(json.dumps(each, ensure_ascii=False) for each in offered)
    text = draw.pick(_OPENINGS).format(functions=functions, request=request)
    return text, json.dumps({"name": called["name"], "arguments": arguments}, ensure_ascii=False)


_TEXT: dict[str, Any] = {"type": "string"}
_WHOLE: dict[str, Any] = {"type": "integer"}
_NUMBER: dict[str, Any] = {"type": "number"}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def _timer(draw: Draw) -> Request:
    minutes, label = draw.between(2, 90), draw.pick(("eggs", "bread", "tea", "laundry", "call", "rice", "nap", "oven"))
    said = draw.pick(
        (
            f"Start a timer of {minutes} minutes for the {label}.",
            f"Tell me when {minutes} minutes are up, for the {label}.",
        )
    )
    return said, {"minutes": minutes, "label": label}


def _weather(draw: Draw) -> Request:
    city, days = draw.pick(_CITIES), draw.between(2, 10)
    unit = draw.pick(("celsius", "fahrenheit"))
    if draw.chance(50):
        return f"What will the weather be in {city} over the next {days} days?", {"city": city, "days": days}
    return f"Forecast for {city}, {days} days, in {unit} please.", {"city": city, "days": days, "unit": unit}


def _convert(draw: Draw) -> Request:
    value = draw.between(2, 900)
    source, target = draw.pick(
        (
            ("feet", "metres"),
            ("miles", "kilometres"),
            ("pounds", "kilograms"),
            ("litres", "gallons"),
            ("inches", "centimetres"),
        )
    )
    said = draw.pick((f"How much is {value} {source} in {target}?", f"Convert {value} {source} to {target}."))
    return said, {"value": value, "source": source, "target": target}


def _message(draw: Draw) -> Request:
    person = draw.pick(_PEOPLE)
    text = draw.pick(
        ("I am running late", "dinner is at eight", "the keys are under the mat", "the train was cancelled",
         "please call me back", "the parcel has arrived", "we meet at the station", "bring an umbrella")
    )  # fmt: skip
    said = draw.pick((f"Write to {person}: {text}.", f"Send {person} a message that says: {text}."))
    return said, {"to": person, "text": text}


def _event(draw: Draw) -> Request:
    title = draw.pick(("dentist", "choir practice", "budget review", "chess club", "swimming lesson", "interview"))
    day, month, hour = draw.between(1, 28), draw.pick(_MONTHS), draw.between(8, 20)
    said = draw.pick(
        (f"Put {title} on {day} {month} at {hour}:00 into my calendar.", f"Add {title}, {day} {month}, {hour}:00.")
    )
    return said, {"title": title, "date": f"{day} {month}", "time": f"{hour}:00"}


def _flight(draw: Draw) -> Request:
    start = draw.pick(_CITIES)
    end = draw.pick([city for city in _CITIES if city != start])
    date, seats = f"{draw.between(1, 28)} {draw.pick(_MONTHS)}", draw.between(2, 6)
    said = draw.pick(
        (
            f"Find {seats} seats from {start} to {end} on {date}.",
            f"On {date}, {seats} of us fly from {start} to {end}. Search flights.",
        )
    )
    return said, {"from": start, "to": end, "date": date, "passengers": seats}


def _hotel(draw: Draw) -> Request:
    city, nights, most = draw.pick(_CITIES), draw.between(2, 14), draw.between(5, 30) * 10
    if draw.chance(50):
        return f"I need a room in {city} for {nights} nights.", {"city": city, "nights": nights}
    return f"A hotel in {city}, {nights} nights, at most {most} a night.", {
        "city": city,
        "nights": nights,
        "max_price": most,
    }


def _lights(draw: Draw) -> Request:
    room, level = draw.pick(_ROOMS), draw.between(0, 20) * 5
    said = draw.pick(
        (f"Set the light in the {room} to {level} percent.", f"{level} percent light in the {room}, please.")
    )
    return said, {"room": room, "level": level}


def _heating(draw: Draw) -> Request:
    room, degrees = draw.pick(_ROOMS), draw.between(12, 26)
    said = draw.pick((f"Make the {room} {degrees} degrees warm.", f"Heating in the {room} to {degrees} degrees."))
    return said, {"room": room, "celsius": degrees}


def _play(draw: Draw) -> Request:
    kind, room = draw.pick(("jazz", "fado", "techno", "opera", "salsa", "blues", "folk", "ambient")), draw.pick(_ROOMS)
    if draw.chance(50):
        return f"Play some {kind}.", {"genre": kind}
    return f"Play {kind} in the {room}.", {"genre": kind, "room": room}


def _translate(draw: Draw) -> Request:
    phrase = draw.pick(
        ("good morning", "where is the station", "thank you very much", "the bill please", "see you soon", "I am lost")
    )
    language = draw.pick(("Finnish", "Portuguese", "Japanese", "Swahili", "Turkish", "Greek", "Polish", "Basque"))
    said = draw.pick((f'How do you say "{phrase}" in {language}?', f'Translate "{phrase}" into {language}.'))
    return said, {"text": phrase, "language": language}


def _stock(draw: Draw) -> Request:
    item, count = (
        draw.pick(("bolts", "filters", "gloves", "lamps", "valves", "cables", "hinges", "seals")),
        draw.between(5, 900),
    )
    said = draw.pick((f"Order {count} {item}.", f"We are short of {item}; get {count} of them."))
    return said, {"item": item, "quantity": count}


def _route(draw: Draw) -> Request:
    start = draw.pick(_CITIES)
    end = draw.pick([city for city in _CITIES if city != start])
    mode = draw.pick(("car", "train", "bicycle", "bus"))
    said = draw.pick((f"How do I get from {start} to {end} by {mode}?", f"Plan a way by {mode} from {start} to {end}."))
    return said, {"from": start, "to": end, "mode": mode}


def _loan(draw: Draw) -> Request:
    amount, rate, years = draw.between(5, 400) * 1000, draw.between(2, 24) / 2, draw.between(2, 30)
    said = draw.pick(
        (
            f"What is the monthly rate of {amount} over {years} years at {rate} percent?",
            f"{amount} borrowed at {rate} percent for {years} years: what do I pay a month?",
        )
    )
    return said, {"amount": amount, "percent": rate, "years": years}


def _area(draw: Draw) -> Request:
    base, height = draw.between(2, 99), draw.between(2, 99)
    said = draw.pick(
        (
            f"Area of a triangle with base {base} and height {height}?",
            f"A triangle is {base} wide and {height} high. Its area?",
        )
    )
    return said, {"base": base, "height": height}


def _reminder(draw: Draw) -> Request:
    what = draw.pick(
        ("water the plants", "pay the rent", "feed the cat", "renew the passport", "back up the disk", "buy stamps")
    )
    days = draw.between(2, 60)
    said = draw.pick((f"Remind me in {days} days to {what}.", f"In {days} days I must {what}; remind me."))
    return said, {"text": what, "in_days": days}


def _table(draw: Draw) -> Request:
    place = draw.pick(("Luna", "The Anchor", "Casa Verde", "Old Mill", "Sakura", "Bistro Nord", "Blue Door"))
    people, hour = draw.between(2, 12), draw.between(17, 22)
    said = draw.pick(
        (f"A table for {people} at {place}, {hour}:00.", f"Book {place} for {people} people at {hour}:00.")
    )
    return said, {"restaurant": place, "people": people, "time": f"{hour}:00"}


def _parcel(draw: Draw) -> Request:
    code = f"{draw.pick('ABCDEFGHKLMNPQRSTVWXZ')}{draw.pick('ABCDEFGHKLMNPQRSTVWXZ')}{draw.between(100_000, 999_999)}"
    said = draw.pick((f"Where is parcel {code}?", f"Track {code} for me."))
    return said, {"code": code}


def _split(draw: Draw) -> Request:
    total, people, tip = draw.between(20, 480), draw.between(2, 12), draw.pick((0, 5, 8, 10, 12, 15, 20))
    said = draw.pick(
        (
            f"Split {total} between {people} people with a {tip} percent tip.",
            f"{people} of us share {total}, tip {tip} percent. Each pays?",
        )
    )
    return said, {"total": total, "people": people, "tip_percent": tip}


def _search(draw: Draw) -> Request:
    subject = draw.pick(("lighthouses", "volcanoes", "looms", "glaciers", "clocks", "bees", "bridges", "kites"))
    year, limit = draw.between(1950, 2020), draw.between(2, 25)
    if draw.chance(50):
        return f"Find {limit} books about {subject}.", {"subject": subject, "limit": limit}
    return f"{limit} books on {subject}, none older than {year}.", {"subject": subject, "limit": limit, "since": year}


def _blinds(draw: Draw) -> Request:
    room, way = draw.pick(_ROOMS), draw.pick(("up", "down"))
    hour = draw.between(5, 22)
    if draw.chance(30):
        return f"Blinds {way} in the {room}.", {"room": room, "direction": way}
    return f"Blinds {way} in the {room} at {hour}:00.", {"room": room, "direction": way, "time": f"{hour}:00"}


def _alarm(draw: Draw) -> Request:
    hour, minute = draw.between(4, 11), draw.between(0, 11) * 5
    day = draw.pick(("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"))
    said = draw.pick((f"Wake me at {hour}:{minute:02} on {day}.", f"Alarm on {day}, {hour}:{minute:02}."))
    return said, {"time": f"{hour}:{minute:02}", "day": day}


FUNCTIONS: tuple[Function, ...] = (
    Function(
        ("start_timer", "set_timer", "timer.start", "countdown"),
        "Start a countdown.",
        {"minutes": _WHOLE, "label": _TEXT},
        _timer,
    ),
    Function(
        ("weather_forecast", "get_weather", "weather.daily", "forecast"),
        "Forecast for a place.",
        {"city": _TEXT, "days": _WHOLE, "unit": _one_of("celsius", "fahrenheit")},
        _weather,
        ("unit",),
    ),
    Function(
        ("convert_units", "unit_convert", "units.convert"),
        "Convert a quantity.",
        {"value": _NUMBER, "source": _TEXT, "target": _TEXT},
        _convert,
    ),
    Function(
        ("send_message", "send_text", "messages.send", "write_to"),
        "Send a text message.",
        {"to": _TEXT, "text": _TEXT},
        _message,
    ),
    Function(
        ("add_event", "create_event", "calendar.add"),
        "Add to the calendar.",
        {"title": _TEXT, "date": _TEXT, "time": _TEXT},
        _event,
    ),
    Function(
        ("search_flights", "find_flights", "flights.search"),
        "Find flights.",
        {"from": _TEXT, "to": _TEXT, "date": _TEXT, "passengers": _WHOLE},
        _flight,
    ),
    Function(
        ("book_hotel", "find_room", "hotels.book"),
        "Book a room.",
        {"city": _TEXT, "nights": _WHOLE, "max_price": _NUMBER},
        _hotel,
        ("max_price",),
    ),
    Function(
        ("set_light", "dim_light", "lights.set"), "Dim or brighten a room.", {"room": _TEXT, "level": _WHOLE}, _lights
    ),
    Function(
        ("set_heating", "heating.set", "set_temperature"),
        "Set a room's temperature.",
        {"room": _TEXT, "celsius": _NUMBER},
        _heating,
    ),
    Function(
        ("play_music", "music.play", "start_playlist"),
        "Play a kind of music.",
        {"genre": _TEXT, "room": _TEXT},
        _play,
        ("room",),
    ),
    Function(
        ("translate", "translate_text", "language.translate"),
        "Translate a phrase.",
        {"text": _TEXT, "language": _TEXT},
        _translate,
    ),
    Function(
        ("order_stock", "reorder", "stock.order"),
        "Order for the store room.",
        {"item": _TEXT, "quantity": _WHOLE},
        _stock,
    ),
    Function(
        ("plan_route", "get_directions", "routes.plan"),
        "Plan a journey.",
        {"from": _TEXT, "to": _TEXT, "mode": _one_of("car", "train", "bicycle", "bus")},
        _route,
    ),
    Function(
        ("loan_payment", "monthly_payment", "finance.loan"),
        "Monthly payment.",
        {"amount": _NUMBER, "percent": _NUMBER, "years": _WHOLE},
        _loan,
    ),
    Function(
        ("triangle_area", "area_of_triangle", "geometry.triangle"),
        "Area of a triangle.",
        {"base": _NUMBER, "height": _NUMBER},
        _area,
    ),
    Function(
        ("set_reminder", "remind_me", "reminders.add"),
        "Remind the user.",
        {"text": _TEXT, "in_days": _WHOLE},
        _reminder,
    ),
    Function(
        ("book_table", "reserve_table", "restaurants.reserve"),
        "Reserve a table.",
        {"restaurant": _TEXT, "people": _WHOLE, "time": _TEXT},
        _table,
    ),
    Function(("track_parcel", "parcel_status", "parcels.track"), "Where a parcel is.", {"code": _TEXT}, _parcel),
    Function(
        ("split_bill", "share_of_bill", "bill.split"),
        "Share of a bill.",
        {"total": _NUMBER, "people": _WHOLE, "tip_percent": _NUMBER},
        _split,
    ),
    Function(
        ("search_books", "find_books", "library.search"),
        "Search the library.",
        {"subject": _TEXT, "limit": _WHOLE, "since": _WHOLE},
        _search,
        ("since",),
    ),
    Function(
        ("move_blinds", "set_blinds", "blinds.move"),
        "Move the blinds.",
        {"room": _TEXT, "direction": _one_of("up", "down"), "time": _TEXT},
        _blinds,
        ("time",),
    ),
    Function(("set_alarm", "wake_up", "alarm.set"), "Set an alarm.", {"time": _TEXT, "day": _TEXT}, _alarm),
)
