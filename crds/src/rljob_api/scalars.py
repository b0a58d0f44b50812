"""Scalar types whose bounds pydantic and the generated CRD both enforce. A string is never converted to a number."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictFloat, StrictInt, StrictStr
from pydantic_core import PydanticCustomError

from rljob_api.quantities import QUANTITY_PATTERN

MAX_COUNT = 2_147_483_647
"""Largest signed integer of 32 bits."""
MAX_NUMBER = 1e12
"""Largest number of a setting. The trainer computes in float32, where 1e39 and the square of 1e20 are infinite."""

_MAX_JSON_INTEGER = 2**63 - 1
# The same names as in the pattern of Kubernetes, which is twice as long; the CRD has it about 80 times.
_SUBDOMAIN = r"[a-z0-9]+((-+|\.)[a-z0-9]+)*"
_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
MAX_DOMAIN = 253
QUALIFIED_NAME = rf"^({_SUBDOMAIN}/)?{_NAME}$"
"""Keys of labels, for example `team` or `example.com/team`; the domain has at most `MAX_DOMAIN` characters."""
ANNOTATION_KEY = QUALIFIED_NAME.replace(_SUBDOMAIN, _SUBDOMAIN.replace("a-z", "A-Za-z"))
"""Keys of annotations: as label keys, and also with capital letters in the domain."""
MAX_RESOURCE_DOMAIN = MAX_DOMAIN - len("requests.")
"""Most characters in the domain of a resource name, because a quota adds the prefix `requests.`."""
RESOURCE_WITH_DOMAIN = rf"^{_SUBDOMAIN}/{_NAME}$"
_DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
_ABSOLUTE_PATH = r"^/[^\x00]*$"
_FUNCTION_PATH = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"
REWARD_NAME = r"^[A-Za-z][A-Za-z0-9_-]*$"
EVALUATION_METRIC = (
    r"^eval/[A-Za-z][A-Za-z0-9_-]*"
    r"/(greedy|excluded_fraction|response_length_mean|(mean|pass|maj)_at_[1-9][0-9]*)$"
)
RELEASE = r"^[0-9]+\.[0-9]+\.[0-9]+$"
_DNS_NAME = rf"^{_SUBDOMAIN}$"
_LABEL_VALUE = rf"^({_NAME})?$"
_FILE_KEY = r"^\.?[-_a-zA-Z0-9][-._a-zA-Z0-9]*$"
_IMAGE_PATH = r"[a-z0-9]+([._-]+[a-z0-9]+)*"
_IMAGE = (
    rf"^(([A-Za-z0-9][-A-Za-z0-9.]*|\[[0-9a-fA-F:]+\])(:[0-9]+)?/)?{_IMAGE_PATH}(/{_IMAGE_PATH})*"
    r"(:[A-Za-z0-9_][-A-Za-z0-9_.]{0,127})?(@[a-z0-9]+([.+_-][a-z0-9]+)*:[0-9a-fA-F]{32,})?$"
)
BUCKET_NAME = r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$"
BUCKET_KEY = r"^[A-Za-z0-9_=-][A-Za-z0-9_.=-]*(/[A-Za-z0-9_=-][A-Za-z0-9_.=-]*)*$"
ENDPOINT = r"^https?://[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{1,5})?/?$"
_REGION = r"^[a-z0-9-]+$"
HTTP_URL = r"^https?://[^@\s]+$"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
RUBRIC = r"\{response\}|^(/|\./|\.\./|~|package://)"
"""Rubrics of judges, and paths of files with a rubric."""
URL_WITHOUT_USER = r"^[^@]+$"
"""URLs and paths without `@`, so without user and password."""
PATTERN_MESSAGES = {
    QUANTITY_PATTERN: (
        "must be a quantity such as 500m, 2, 1.5, 1e3 or 16Gi, and not negative",
        "use a number, optionally with one of the suffixes n, u, m, k, M, G, T, P, E, Ki, Mi, Gi, Ti, Pi, Ei or an"
        " exponent",
    ),
    QUALIFIED_NAME: (
        "must be a label key such as team or example.com/team",
        "use at most 63 letters, digits, '-', '_' and '.' (a domain not counted), with a letter or digit at both ends",
    ),
    ANNOTATION_KEY: (
        "must be an annotation key such as note or example.com/note",
        "use at most 63 letters, digits, '-', '_' and '.' (a domain not counted), with a letter or digit at both ends",
    ),
    RESOURCE_WITH_DOMAIN: (
        "must be a resource name with a domain, such as nvidia.com/gpu",
        "use the resource name that `kubectl describe node` shows",
    ),
    _LABEL_VALUE: (
        "must be a label value, such as research",
        "use at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends",
    ),
    _DNS_LABEL: (
        "must be a name of lower case letters, digits and '-', such as team-a",
        "use a letter or digit at both ends",
    ),
    _ENV_NAME: (
        "must be the name of an environment variable, such as LOG_LEVEL",
        "use letters, digits and '_', and no digit at the start",
    ),
    _ABSOLUTE_PATH: ("must be an absolute path, such as /data", "start it with '/'"),
    _FUNCTION_PATH: (
        "must be module:name, such as my_rewards:score",
        "write ':' before the name of the function or class, and the name of the module without .py",
    ),
    REWARD_NAME: (
        "must be a name of letters, digits, '-' and '_', such as format",
        "start it with a letter",
    ),
    EVALUATION_METRIC: (
        "must be a metric of an evaluation, such as eval/heldout/greedy",
        "write eval/NAME/ and greedy, mean_at_8, pass_at_1 or maj_at_8",
    ),
    RELEASE: ("must be a release such as 2.54.0", "use three numbers with dots between them"),
    _DNS_NAME: (
        "must be the name of a Kubernetes object, such as my-data or my.data",
        "use lower case letters, digits, '-' and '.', with a letter or digit at both ends of each part",
    ),
    _FILE_KEY: (
        "must be a key of a Secret or ConfigMap, such as token or hf.token",
        "use letters, digits, '-', '_' and '.', and not '..' at the start",
    ),
    _IMAGE: (
        "must be the name of a container image, such as registry.example/team/trainer:1.2",
        "use lower case, without spaces and without https://",
    ),
    BUCKET_NAME: (
        "must be the name of a bucket, such as team-checkpoints",
        "use 3 to 63 lower case letters, digits, '-' and '.', with a letter or digit at both ends, and without s3://",
    ),
    BUCKET_KEY: (
        "must be a folder in the bucket, such as team/run-1",
        "use letters, digits, '-', '_', '=' and '.', with '/' between names and not at the ends; no name may start"
        " with '.'",
    ),
    ENDPOINT: (
        "must be the URL of a store, such as https://minio.example:9000",
        "use http:// or https://, a host and if necessary a port; without user, password and path",
    ),
    _REGION: ("must be a region, such as eu-central-1", "use lower case letters, digits and '-'"),
    HTTP_URL: (
        "must be an http or https URL without a user, such as https://api.openai.com/v1",
        "start it with http:// or https://",
    ),
    RUBRIC: (
        "must contain {response}, where the response is inserted, or be the path of a file, such as ./rubric.txt",
        "write {response} into the rubric, or start the path with ./ or /",
    ),
    URL_WITHOUT_USER: (
        "must not contain a user or a password",
        "use variables for them, such as MLFLOW_TRACKING_USERNAME, from a Secret",
    ),
}
"""For each pattern of a string: what the string must be, and how to fix it."""


QUANTITY_ERROR = "rljob_quantity"
"""Type of the pydantic error for a value that is no string, and would not be a quantity in quotes either."""


def _quantity_text(value: object) -> object:
    """Converts a whole number to a string. Returns a string unchanged, and also any other number that would be a
    quantity in quotes: for such a number pydantic then reports that a string is required. Raises a pydantic
    error of the type `QUANTITY_ERROR` for all other values."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_JSON_INTEGER:
        return str(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, str) or (is_number and re.search(QUANTITY_PATTERN, str(value))):
        return value
    raise PydanticCustomError(QUANTITY_ERROR, "must be a quantity")


def _without_nulls(value: object) -> object:
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


def has_user(text: str) -> bool:
    """Whether the text contains a URL with a user, and perhaps a password."""
    return re.search(r"://[^/\s]*@", text) is not None


def _with_host(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_usable = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ValueError("must have a host and, if it has a port, one from 1 to 65535, such as http://judge:8000/v1")
    return url


def _model_source(source: str) -> str:
    if _URL.match(source) and not source.startswith(("package://", "run://")):
        raise ValueError(
            "must be a Hugging Face repository, a folder, or a path with `package://` or `run://`, because other URLs"
            " cannot be read"
        )
    return source


def _file_path(path: str) -> str:
    if _URL.match(path) and not path.startswith("package://"):
        raise ValueError("must be a path in a volume or image, or a path with `package://`; other URLs cannot be read")
    return path


WITHOUT_NULLS = BeforeValidator(_without_nulls)
"""Validator of maps that removes entries whose value is null, as the API server does."""

Flag = StrictBool
Integer = StrictInt
Count = Annotated[Integer, Field(ge=0, le=MAX_COUNT)]
PositiveCount = Annotated[Integer, Field(ge=1, le=MAX_COUNT)]
Seconds = Annotated[Integer, Field(ge=1, le=MAX_COUNT)]
FiniteNumber = Annotated[StrictFloat, Field(allow_inf_nan=False)]
TimeLimit = Annotated[FiniteNumber, Field(gt=0, le=1_000_000)]
"""Seconds, with fractions of a second."""
Number = Annotated[FiniteNumber, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
NonNegativeNumber = Annotated[FiniteNumber, Field(ge=0, le=MAX_NUMBER)]
PositiveNumber = Annotated[FiniteNumber, Field(gt=0, le=MAX_NUMBER)]
Temperature = Annotated[FiniteNumber, Field(ge=0.01, le=MAX_NUMBER)]
DecayRate = Annotated[FiniteNumber, Field(ge=0, lt=1)]
"""A number from 0 to below 1."""
OpenFraction = Annotated[FiniteNumber, Field(gt=0, le=1)]
"""A number above 0 and up to 1."""
Fraction = Annotated[FiniteNumber, Field(ge=0, le=1)]
"""A number from 0 to 1."""

ShortText = Annotated[StrictStr, Field(min_length=1, max_length=253)]
LongText = Annotated[StrictStr, Field(min_length=1, max_length=4096)]
ModelSource = Annotated[LongText, AfterValidator(_model_source)]
FilePath = Annotated[LongText, AfterValidator(_file_path)]
HttpUrl = Annotated[StrictStr, Field(max_length=4096, pattern=HTTP_URL), AfterValidator(_with_host)]
UrlWithoutUser = Annotated[StrictStr, Field(max_length=4096, pattern=URL_WITHOUT_USER)]
BucketName = Annotated[StrictStr, Field(max_length=63, pattern=BUCKET_NAME)]
BucketKey = Annotated[StrictStr, Field(max_length=512, pattern=BUCKET_KEY)]
"""A folder in a bucket. Other characters would have to be encoded in requests."""
EndpointUrl = Annotated[StrictStr, Field(max_length=300, pattern=ENDPOINT), AfterValidator(_with_host)]
RegionName = Annotated[StrictStr, Field(max_length=63, pattern=_REGION)]
DnsLabel = Annotated[StrictStr, Field(max_length=63, pattern=_DNS_LABEL)]
DnsName = Annotated[StrictStr, Field(max_length=253, pattern=_DNS_NAME)]
LabelKey = Annotated[StrictStr, Field(max_length=253, pattern=QUALIFIED_NAME)]
AnnotationKey = Annotated[StrictStr, Field(max_length=317, pattern=ANNOTATION_KEY)]
LabelValue = Annotated[StrictStr, Field(max_length=63, pattern=_LABEL_VALUE)]
LabelMap = Annotated[dict[StrictStr, LabelValue], Field(max_length=32), WITHOUT_NULLS]
"""Labels. Rules check the keys, because a schema in a CRD cannot restrict the keys of a map."""
ResourceWithDomain = Annotated[StrictStr, Field(max_length=MAX_RESOURCE_DOMAIN + 64, pattern=RESOURCE_WITH_DOMAIN)]
FileKey = Annotated[StrictStr, Field(max_length=253, pattern=_FILE_KEY)]
"""A key of a Secret or ConfigMap."""
ImageName = Annotated[StrictStr, Field(max_length=1024, pattern=_IMAGE)]
EnvName = Annotated[StrictStr, Field(max_length=128, pattern=_ENV_NAME)]
AbsolutePath = Annotated[StrictStr, Field(max_length=1024, pattern=_ABSOLUTE_PATH)]
Quantity = Annotated[
    StrictStr,
    Field(
        max_length=32,
        pattern=QUANTITY_PATTERN,
        json_schema_extra={"x-kubernetes-int-or-string": True, "minimum": 0},
    ),
    BeforeValidator(_quantity_text),
]
"""A Kubernetes quantity such as `500m`, `1e3` or `16Gi`; whole numbers may be written without quotes."""
FunctionPath = Annotated[StrictStr, Field(max_length=253, pattern=_FUNCTION_PATH)]
"""A function or class in the form `package.module:name`."""
