"""Fields of multipart forms, of clients and of those that are none."""

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import UserError
from baton.http.forms import FIELD_BYTES_MAX, PARTS_MAX, fields_of, is_form

TYPE = "multipart/form-data; boundary=xyz"
END = b"--xyz--\r\n"


def part(head: str, value: bytes) -> bytes:
    return b"--xyz\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + value + b"\r\n"


MODEL = part('name="model"', b"m")


def texts(body: bytes, content_type: str = TYPE) -> dict[str, str]:
    return {name: field.text for name, field in fields_of(body, content_type).items()}


@given(st.binary(max_size=200), st.text("abc/-.", max_size=20))
def test_fields_of_a_form_of_httpx_are_found_beside_its_files(file: bytes, model: str) -> None:
    form = httpx.Request("POST", "http://a", files={"file": file}, data={"model": model, "stream": "true"})
    assert texts(form.read(), form.headers["content-type"]) == {"model": model, "stream": "true"}


def test_a_field_is_where_it_says() -> None:
    body = b"preamble\r\n" + part('name="file"; filename="a"', b"--xy\r\n") + MODEL + END
    found = fields_of(body, TYPE)["model"]
    assert (found.text, body[found.start : found.end]) == ("m", b"m")


def test_files_and_long_fields_are_no_fields_and_the_last_of_a_name_counts() -> None:
    body = part('name="model"; filename="a"', b"x") + part('name="long"', b"y" * (FIELD_BYTES_MAX + 1))
    body += MODEL + part('name="model"', b"") + part('filename="a"', b"z")
    assert texts(body + END) == {"model": ""}


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (MODEL + END, "multipart/form-data"),
        (b"", TYPE),
        (b"no boundary", TYPE),
        (MODEL, TYPE),
        (b"--xyz", TYPE),
        (b"--xyz\r\nno headers\r\n--xyz--", TYPE),
        (b"--xyz\r\n" + b"a: b\r\n" * 10_000 + b"\r\n\r\n--xyz--", TYPE),
        (part('name="a"', b"") * (PARTS_MAX + 1) + END, TYPE),
    ],
)
def test_what_is_no_form_is_refused(body: bytes, content_type: str) -> None:
    with pytest.raises(UserError):
        fields_of(body, content_type)


def test_boundaries_may_be_quoted() -> None:
    assert texts(MODEL + END, 'Multipart/Form-Data; charset=a; Boundary="xyz"') == {"model": "m"}
    assert is_form({"content-type": "Multipart/Form-Data; boundary=a"})
    assert not is_form({"content-type": "application/json"})
    assert not is_form({})
