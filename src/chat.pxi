# Owns the chat template handle, what it renders, and what it parses.

import msgspec

@dataclass(frozen=True)
class Rendered:
    """A rendered conversation, and what its reply needs.

    ``parts`` joined are the text; each is a pair of its text and whether it came from the messages. ``grammar`` (empty:
    none), ``grammar_lazy`` and ``grammar_triggers`` hold the reply to the tools' form. ``syntax`` is for `parse`.
    """

    text: str
    parts: tuple
    grammar: str
    grammar_lazy: bool
    grammar_triggers: tuple
    generation_prompt: str
    supports_thinking: bool
    thinking_start: str
    thinking_ends: tuple
    preserved_tokens: tuple
    additional_stops: tuple
    format: str
    syntax: str


@dataclass(frozen=True)
class ToolCall:
    """A call that a reply asks for; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ChatMessage:
    """A reply, taken apart."""

    role: str
    content: str
    reasoning: str
    tool_calls: tuple


# Keys of a request that are not variables of the template.
cdef frozenset REQUEST_KEYS = frozenset(
    ["tool_choice", "parallel_tool_calls", "enable_thinking", "reasoning_format", "grammar", "json_schema"])


cdef bint is_plain(object value, int depth):
    """Whether it is of JSON's own types, no subclasses of them, and so written alike by every encoder."""
    cdef object kind = type(value)
    if kind is str or kind is bool or value is None:
        return True
    if kind is int:
        return INT32_MIN <= value <= INT32_MAX
    if kind is float:
        return value - value == 0  # finite
    if depth > 100:
        return False
    if kind is dict:
        for key, item in (<dict>value).items():
            if type(key) is not str or not is_plain(item, depth + 1):
                return False
        return True
    if kind is list:
        for item in <list>value:
            if not is_plain(item, depth + 1):
                return False
        return True
    return False


cdef bytes dump_request(dict request):
    """As JSON. The fast encoder writes what it does not refuse; the other one has the words for what is wrong."""
    if is_plain(request, 0):
        try:
            return msgspec.json.encode(request)
        except UnicodeEncodeError:
            pass
    return dump_json(request, "the request")


@cython.final
@cython.no_gc
cdef class ChatTemplate:
    """A compiled chat template: the pinned Jinja engine. One thread at a time.

    Parameters
    ----------
    origin
        A model, for its own template (ChatML where it has none), or the source of one.
    model
        With a source: whose BOS and EOS texts it shall have.

    Raises
    ------
    TemplateError  does not parse, or its trial run fails or exceeds its limits
    """

    cdef lcs_chat_template* _template
    cdef bint _busy
    cdef int _pid
    cdef dict _info
    cdef bytes _syntax  # of the last render
    cdef object __weakref__

    def __cinit__(self, origin, *, model=None):
        cdef lcs_status st
        cdef lcs_string* text = NULL
        cdef lcs_model* owner = NULL
        cdef const char* data = NULL
        cdef size_t n = 0
        cdef bytes source = None
        self._pid = getpid()
        if isinstance(origin, Model):
            if model is not None and model is not origin:
                raise errors.InvalidArgumentError("two models were given", field="model")
            model = origin
        else:
            source = as_text(origin, "a template")
            data = PyBytes_AS_STRING(source)
            n = <size_t>len(source)
        if model is not None and not isinstance(model, Model):
            raise TypeError(f"model must be a Model, not {type(model).__name__}")
        if model is not None:
            owner = (<Model>model).enter()
        else:
            begin_inside()
        try:
            with nogil:
                st = lcs_chat_template_init(owner, data, n, &self._template)
            check(st)
        finally:
            if model is not None:
                (<Model>model).leave()
            else:
                end_inside()
        check(lcs_chat_template_info(self._template, &text))
        self._info = json_of(text)

    def __dealloc__(self):
        if self._template is not NULL:
            with nogil:
                lcs_chat_template_free(self._template)  # nothing in a forked child

    cdef int require_open(self) except -1:
        if self._pid != getpid():
            raise errors.ForkedError("chat template was made before fork()")
        if self._template is NULL:
            raise errors.ClosedError("chat template is closed")
        return 0

    cdef lcs_chat_template* enter(self) except NULL:
        self.require_open()
        if self._busy:
            raise errors.BusyError("chat template is inside another call")
        begin_inside()
        self._busy = True
        return self._template

    cdef int leave(self) except -1:
        self._busy = False
        return end_inside()

    def close(self):
        """Free it. Safe to repeat; BusyError while another thread is inside."""
        cdef lcs_chat_template* template
        if self._template is NULL:
            return
        if self._pid != getpid():
            self._template = NULL
            return
        template = self.enter()
        self._template = NULL
        with nogil:
            lcs_chat_template_free(template)
        self.leave()

    @property
    def closed(self):
        """Whether close() was called."""
        return self._template is NULL

    def __enter__(self):
        self.require_open()
        return self

    def __exit__(self, kind, value, traceback):
        self.close()

    def __copy__(self):
        refuse_copy(self, "copied")

    def __deepcopy__(self, memo):
        refuse_copy(self, "copied")

    def __reduce__(self):
        refuse_copy(self, "pickled")

    def __repr__(self):
        return f"<llamacppshim.ChatTemplate{', closed' if self._template is NULL else ''}>"

    @property
    def source(self):
        """The Jinja source."""
        self.require_open()
        return self._info["source"]

    @property
    def supports_tools(self):
        """Whether the template shows tools to the model."""
        self.require_open()
        return bool(self._info["supports_tools"])

    @property
    def supports_thinking(self):
        """Whether the template knows of thinking."""
        self.require_open()
        return bool(self._info["supports_thinking"])

    @property
    def capabilities(self):
        """All that the engine found out about the template. A new dict of bools."""
        self.require_open()
        return {key: value for key, value in self._info.items() if isinstance(value, bool)}

    def render(self, messages, tools=None, add_generation_prompt=True, **kwargs):
        """Render a conversation.

        Parameters
        ----------
        messages
            Dicts with ``role``, ``content`` (text, parts or None), and ``tool_calls``, ``reasoning_content``, ``name``,
            ``tool_call_id`` where needed.
        tools
            Dicts of OpenAI's function form.
        kwargs
            ``tool_choice parallel_tool_calls enable_thinking reasoning_format grammar json_schema``; others are variables
            of the template.

        Raises
        ------
        InvalidArgumentError  messages or tools are not of this form
        TemplateError         the template raised, or exceeded its limits
        """
        cdef lcs_string* text = NULL
        cdef lcs_status st
        request = {"messages": messages, "add_generation_prompt": bool(add_generation_prompt)}
        if tools is not None:
            request["tools"] = tools
        variables = {}
        for key, value in kwargs.items():
            (request if key in REQUEST_KEYS else variables)[key] = value
        if variables:
            request["kwargs"] = variables
        cdef bytes raw = dump_request(request)
        cdef const char* data = PyBytes_AS_STRING(raw)
        cdef size_t n = <size_t>len(raw)
        cdef lcs_chat_template* template = self.enter()
        try:
            with nogil:
                st = lcs_chat_template_render(template, data, n, &text)
            check(st)
            try:
                found = msgspec.json.decode(lcs_string_data(text)[:lcs_string_bytes(text)])
            finally:
                lcs_string_free(text)
            self._syntax = found["syntax"].encode("utf-8")
        finally:
            self.leave()
        return Rendered(
            text=found["text"],
            parts=tuple([(part[0], bool(part[1])) for part in found["parts"]]),
            grammar=found["grammar"],
            grammar_lazy=found["grammar_lazy"],
            grammar_triggers=tuple(found["grammar_triggers"]),
            generation_prompt=found["generation_prompt"],
            supports_thinking=found["supports_thinking"],
            thinking_start=found["thinking_start"],
            thinking_ends=tuple(found["thinking_ends"]),
            preserved_tokens=tuple(found["preserved_tokens"]),
            additional_stops=tuple(found["additional_stops"]),
            format=found["format"],
            syntax=found["syntax"],
        )

    def parse(self, text, partial=False, rendered=None):
        """Take a reply apart.

        Parameters
        ----------
        text
            What the model wrote.
        partial
            It may stop anywhere.
        rendered
            What asked for it; None: the last render, or where there was none, that of a user's message.

        Raises
        ------
        TemplateError  the text does not fit the syntax
        """
        cdef lcs_string* found = NULL
        cdef lcs_status st
        cdef bytes raw = as_text(text, "text")
        cdef bytes syntax
        cdef bint may_stop = partial
        if rendered is not None:
            syntax = as_text(rendered.syntax, "syntax")
        else:
            self.require_open()
            if self._syntax is None:
                self.render([{"role": "user", "content": ""}])
            syntax = self._syntax
        cdef const char* c_syntax = PyBytes_AS_STRING(syntax)
        cdef const char* data = PyBytes_AS_STRING(raw)
        cdef size_t n_syntax = <size_t>len(syntax), n = <size_t>len(raw)
        self.enter()
        try:
            with nogil:
                st = lcs_chat_parse(c_syntax, n_syntax, data, n, may_stop, &found)
            check(st)
            message = json_of(found)
        finally:
            self.leave()
        return ChatMessage(
            role=message["role"],
            content=message["content"] or "",
            reasoning=message["reasoning_content"] or "",
            tool_calls=tuple([ToolCall(call["id"], call["name"], call["arguments"])
                              for call in message["tool_calls"]]),
        )
