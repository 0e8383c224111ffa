"""Each view: what axe finds, at which width, in which language and theme, with which hands; text that tries to run."""

import re
import threading

import pytest
from playwright.sync_api import expect

from tests.browser.world import FEE

EVIL = '"><img src=x onerror="document.title=`owned`"><script>document.title=`owned`</script>'
PHONE = {"viewport": {"width": 360, "height": 740}}
ANSWER = (FEE, ".")


@pytest.fixture(autouse=True)
def replies(world):
    """Each test begins with a quick answer that is in the contract."""
    world.engine.reply, world.engine.token_delay_s = ANSWER, 0.0


@pytest.fixture(scope="module")
def session(world, contract):
    """A conversation of Ann with an answer that has a citation."""
    world.engine.reply = ANSWER
    with world.client("ann") as client:
        made = client.post("/v1/sessions", json={"document_ids": [contract], "title": "The service charge"}).json()
        path = f"/v1/sessions/{made['id']}/questions"
        answer = client.post(path, json={"question": "How much is the yearly service charge?"}).json()
    assert answer["citations"]
    return made["id"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("options", [{}, PHONE], ids=["wide", "phone"])
def test_every_view_is_accessible(visit, contract, session, picture, scheme, options):
    visitor = visit(color_scheme=scheme, **options)
    page, faults = visitor.page, {}
    name = f"{scheme}-{'phone' if options else 'wide'}"
    page.goto("/app/sign-in")
    faults["sign in"] = visitor.faults()
    picture(page, f"web-sign-in-{name}")
    visitor.give_cookie("ann").goto("/")
    page.get_by_text("Options").click()
    faults["library"] = visitor.faults()
    picture(page, f"web-library-{name}")
    for dialog in ("Edit", "Delete", "Share"):
        opened = "Rename" if dialog == "Edit" else dialog
        page.get_by_role("button", name=re.compile(f"^{opened} Operation")).click()
        expect(page.get_by_role("dialog")).to_be_visible()
        faults[dialog] = visitor.faults()
        picture(page, f"web-{dialog.lower()}-{name}")
        page.keyboard.press("Escape")
    page.goto(f"/app/sessions/{session}")
    expect(page.locator(".chip")).to_be_visible()
    faults["conversation"] = visitor.faults()
    picture(page, f"web-conversation-{name}")
    page.locator(".chip").click()
    page.get_by_role("button", name="Text", exact=True).click()
    expect(page.locator("mark")).to_be_visible()
    faults["page"] = visitor.faults()
    picture(page, f"web-page-{name}")
    page.goto("/app/documents/doc_none")
    faults["error"] = visitor.faults()
    assert {view: found for view, found in faults.items() if found} == {}


def test_the_pdf_is_shown_where_the_browser_can(visit, session, contract, picture):
    page = visit(viewport={"width": 1360, "height": 860}).give_cookie("ann")
    page.goto(f"/app/sessions/{session}")
    page.locator(".chip").click()
    assert page.evaluate("navigator.pdfViewerEnabled")
    frame = page.locator("#page iframe")
    expect(frame).to_have_attribute("src", re.compile(rf"/app/documents/{contract}/file#page=\d+"))
    expect(page.locator("#viewer-quote")).to_contain_text("2,340,000 pounds")
    shown = page.request.get(frame.get_attribute("src").partition("#")[0])
    assert shown.headers["content-type"] == "application/pdf"
    assert shown.headers["content-disposition"].startswith("inline")
    page.wait_for_timeout(1500)
    picture(page, "web-pdf")
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    expect(page.locator("#viewer-close")).to_be_in_viewport(ratio=1)


def test_everything_goes_by_keyboard(visit, session, contract):
    page = visit().give_cookie("ann")
    page.goto("/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    reach(page, page.get_by_role("button", name="Share Operation"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Share Operation")).to_be_focused()
    page.goto(f"/app/sessions/{session}")
    chip = page.locator(".chip")
    expect(chip).to_be_visible()
    reach(page, chip)
    page.keyboard.press("Enter")
    expect(page.locator("#viewer")).to_be_focused()
    page.keyboard.press("Escape")
    expect(chip).to_be_focused()
    reach(page, page.get_by_label("Your question"))
    page.keyboard.type("And by keyboard?")
    page.keyboard.press("Enter")
    expect(page.locator(".answer").nth(1)).to_contain_text("2,340,000")
    expect(page.get_by_label("Your question")).to_be_focused()


def reach(page, target):
    """By Tab alone; what has the focus on the way is marked."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if target.evaluate("element => element === document.activeElement"):
            outline = target.evaluate("element => getComputedStyle(element).outlineStyle")
            assert outline == "solid"
            return
    raise AssertionError("it is not reached by Tab")


def test_text_of_others_never_runs(world, visit):
    document_id = world.document("eve", f"{EVIL} The keeper is Marta.\n".encode() * 3, f"{EVIL}.txt", title=EVIL)
    world.engine.reply = (EVIL, " The keeper is Marta.")
    page = visit().give_cookie("eve")
    page.goto("/")
    expect(page.get_by_role("link", name="onerror")).to_be_visible()
    page.get_by_role("button", name=re.compile("^Delete")).click()
    expect(page.get_by_role("dialog")).to_contain_text("onerror")
    page.goto(f"/app/documents/{document_id}")
    page.get_by_label("Your question").fill(EVIL)
    page.keyboard.press("Enter")
    expect(page.locator(".answer")).to_contain_text("<script>document.title")
    expect(page.locator(".question")).to_have_text(EVIL)
    page.get_by_role("button", name="Open the document").click()
    expect(page.locator(".page-text")).to_contain_text("<img src=x")
    assert page.title() != "owned"
    assert page.locator("main img, main script, dialog img").count() == 0


def test_an_answer_is_taken_up_after_a_reload_and_can_be_stopped(world, visit, contract):
    world.engine.reply = tuple(f"word{n} " for n in range(400))
    world.engine.token_delay_s = 0.05
    page = visit().give_cookie("ann")
    page.goto(f"/app/documents/{contract}")
    page.get_by_label("Your question").fill("Tell me all of it.")
    page.keyboard.press("Enter")
    answer = page.locator(".answer")
    expect(answer).to_contain_text("word3 ")
    page.reload()
    expect(answer).to_contain_text("word0 word1 word2 ")
    expect(answer).to_have_attribute("aria-busy", "true")
    page.context.set_offline(True)
    page.wait_for_timeout(300)
    page.context.set_offline(False)
    page.get_by_role("button", name="Stop").click()
    expect(answer).to_have_attribute("aria-busy", "false")
    expect(page.get_by_text("Stopped here.")).to_be_visible()
    expect(page.get_by_label("Your question")).to_be_focused()
    assert answer.inner_text().count("word5 ") == 1, "nothing comes twice"
    page.get_by_role("button", name="Go on from here in a copy").click()
    page.wait_for_url(re.compile(r"/app/sessions/ses_"))
    expect(page.locator(".answer")).to_contain_text("word5 ")


def test_a_lost_connection_is_waited_out(world, visit, contract):
    world.engine.reply = tuple(f"part{n} " for n in range(25))
    world.engine.token_delay_s = 0.1
    page = visit().give_cookie("ann")
    page.goto(f"/app/documents/{contract}")
    resumed = threading.Event()
    page.on("request", lambda request: "last-event-id" in request.headers and resumed.set())
    page.evaluate(BROKEN_ONCE)
    page.get_by_label("Your question").fill("All of it?")
    page.keyboard.press("Enter")
    answer = page.locator(".answer")
    expect(answer).to_have_attribute("aria-busy", "false")
    text = answer.inner_text()
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.get_by_role("button", name="Copy", exact=True).click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert [text.count(f"part{n} ") for n in range(24)] == [1] * 24
    assert resumed.is_set()


def test_a_stream_that_falls_silent_is_taken_up_again(world, visit, contract):
    """As after a laptop slept: nothing says that the connection is gone."""
    world.engine.reply = tuple(f"part{n} " for n in range(9))
    world.engine.token_delay_s = 0.1
    page = visit().give_cookie("ann")
    page.clock.install()
    page.goto(f"/app/documents/{contract}")
    page.evaluate(BROKEN_ONCE.replace('controller.error(new TypeError("lost"));', "return new Promise(() => {});"))
    page.get_by_label("Your question").fill("And with the lid closed?")
    page.keyboard.press("Enter")
    answer = page.locator(".answer")
    expect(answer).to_contain_text("part0")
    page.wait_for_timeout(1500)
    expect(answer).to_have_attribute("aria-busy", "true")
    page.clock.fast_forward(50_000)
    expect(answer).to_have_attribute("aria-busy", "false")
    assert [answer.inner_text().count(f"part{n} ") for n in range(8)] == [1] * 8


def test_waiting_is_told_and_the_conversation_is_at_hand_at_once(world, visit, contract):
    world.engine.token_delay_s = 2.0
    page = visit(viewport={"width": 900, "height": 700}).give_cookie("ann")
    page.clock.install()
    page.goto(f"/app/documents/{contract}")
    expect(page.get_by_role("button", name="Share this conversation")).to_be_hidden()
    page.get_by_label("Your question").fill("How much, and when?")
    page.keyboard.press("Enter")
    page.wait_for_url("**/app/sessions/*")
    page.clock.fast_forward(5_100)
    expect(page.get_by_text("The first word takes long")).to_be_visible()
    expect(page.locator(".answer")).to_contain_text("2,340,000")
    expect(page.get_by_text("The first word takes long")).to_be_hidden()
    page.get_by_role("button", name="Share this conversation").click()
    expect(page.get_by_role("dialog")).to_contain_text("How much, and when?")
    page.keyboard.press("Escape")
    address = page.url
    page.get_by_role("button", name="中文").click()
    expect(page.get_by_role("button", name="提问", exact=True)).to_be_visible()
    assert page.url == address, "the switch does not leave a conversation that has just begun"
    page.get_by_role("link", name="开始新对话").click()
    page.wait_for_url(f"**/app/documents/{contract}")


def test_who_waits_for_another_document_is_told(world, visit):
    world.engine.chunk_delay_s = 0.5
    page = visit().give_cookie("fay")
    page.goto("/")
    long, short = (b"The keeper of the mill is Jan Vos. " * n for n in (600, 9))
    page.get_by_label("Add documents").set_input_files(
        [
            {"name": "long.txt", "mimeType": "text/plain", "buffer": long},
            {"name": "short.txt", "mimeType": "text/plain", "buffer": short},
        ]
    )
    rows = page.locator("#documents li")
    expect(rows.filter(has_text="long.txt").locator(".reading-text")).to_contain_text("Reading")
    expect(rows.filter(has_text="short.txt").locator(".reading-text")).to_have_text("Waiting to be read · 1 page")
    world.engine.chunk_delay_s = 0.0
    expect(rows.filter(has_text="short.txt")).to_contain_text("ready from")


def test_a_document_that_was_there_already_is_told(world, visit):
    page = visit().give_cookie("ann")
    page.goto("/")
    file = {"name": "twice.txt", "mimeType": "text/plain", "buffer": b"The keeper of the lamp is Ilse Brandt. " * 9}
    page.get_by_label("Add documents").set_input_files([file])
    expect(page.locator("#documents li", has_text="twice.txt")).to_contain_text("tokens")
    page.get_by_label("Add documents").set_input_files([file])
    line = page.locator("#uploads li")
    expect(line).to_contain_text("twice.txt was there already.")
    line.get_by_role("button", name="Close").click()
    expect(line).to_have_count(0)


BROKEN_ONCE = """() => {
  const whole = window.fetch;
  window.fetch = async (...args) => {
    const response = await whole(...args);
    if (args[1]?.method !== "POST" || !String(args[0]).includes("/questions")) return response;
    const reader = response.body.getReader();
    let n = 0;
    const body = new ReadableStream({
      async pull(controller) {
        const { value } = await reader.read();
        if ((n += 1) > 3) { reader.cancel(); controller.error(new TypeError("lost")); } else controller.enqueue(value);
      },
    });
    return new Response(body, { status: 200, headers: response.headers });
  };
}"""


def test_lists_go_on_by_keyboard_on_a_phone(world, visit):
    with world.client("dora") as client:
        for i in range(23):
            name = f"light-{i}.txt"
            document_id = world.document("dora", f"Light number {i}. ".encode() * 20, name, title=f"Light {i}")
            client.post("/v1/sessions", json={"document_ids": [document_id], "title": f"About light {i}"})
    visitor = visit(**PHONE)
    page = visitor.give_cookie("dora")
    page.goto("/")
    for of, first in (("Your documents", "Light 2"), ("Conversations", "About light 2")):
        more = page.get_by_role("button", name=f"Show more · {of}", exact=True)
        expect(page.get_by_role("link", name=first, exact=True)).to_have_count(0)
        more.focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("link", name=first, exact=True)).to_be_focused()
        expect(more).to_have_count(0)
    expect(page.get_by_role("link", name=re.compile("^(About )?[Ll]ight"))).to_have_count(46)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert visitor.faults() == []


def test_in_chinese(visit, contract, picture):
    visitor = visit(locale="zh-CN", viewport={"width": 900, "height": 700})
    page = visitor.give_cookie("ann")
    page.goto(f"/app/documents/{contract}")
    assert page.evaluate("document.documentElement.lang") == "zh"
    page.get_by_label("您的问题").fill("每年的服务费是多少？")
    page.get_by_role("button", name="提问", exact=True).click()
    expect(page.locator(".cost summary").first).to_contain_text("复用")
    assert visitor.faults() == []
    page.evaluate("scrollTo(0, 0)")
    picture(page, "web-chinese")
    busy = {"title": "Too many", "status": 429, "detail": "Eight answers run.", "error": {"code": "queue_full"}}
    page.route("**/questions", lambda route: route.fulfill(status=429, json=busy, headers={"Retry-After": "3"}))
    page.get_by_label("您的问题").fill("还有吗？")
    page.get_by_role("button", name="提问", exact=True).click()
    refusal = page.locator("#turns [role=alert]")
    expect(refusal).to_contain_text("服务器繁忙。")
    expect(refusal).to_contain_text("请在 3 秒后重试。")
    expect(refusal.get_by_text("Eight answers run.")).to_be_hidden()
    refusal.get_by_text("服务器原文（英文）").click()
    expect(refusal.get_by_text("Eight answers run.")).to_be_visible()
    assert visitor.faults() == []
    page.get_by_role("button", name="English").click()
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_visible()
    expect(page.locator("html")).to_have_attribute("lang", "en")
    page.get_by_role("button", name="Dark").click()
    expect(page.locator("body")).to_have_css("background-color", "rgb(23, 23, 21)")


def test_a_link_is_opened_beside_ones_own_sign_in(world, visit, contract):
    with world.client("ann") as client:
        body = {"with": "link", "access": "ask"}
        token = client.post(f"/v1/documents/{contract}/shares", json=body).json()["token"]
    page = visit().give_cookie("carol")
    page.goto(f"/app/link#{token}")
    page.wait_for_url(re.compile(r"/link/shr_\w+/app/documents/"))
    assert token.split(".")[1] not in page.url
    page.get_by_label("Your question").fill("How much?")
    page.keyboard.press("Enter")
    expect(page.locator(".answer")).to_contain_text("2,340,000")
    page.goto("/")
    expect(page.get_by_text("Nothing here yet")).to_be_visible()
    with world.client("ann") as client:
        for share in client.get(f"/v1/documents/{contract}/shares").json()["data"]:
            client.delete(f"/v1/documents/{contract}/shares/{share['id']}")
    page.go_back()
    expect(page.get_by_role("heading", level=1)).to_contain_text("A shared document")
    expect(page.get_by_text("it was revoked")).to_be_visible()


def test_a_conversation_is_deleted(world, visit, contract):
    with world.client("ann") as client:
        body = {"document_ids": [contract], "title": "Not wanted"}
        session_id = client.post("/v1/sessions", json=body).json()["id"]
    page = visit().give_cookie("ann")
    page.goto(f"/app/sessions/{session_id}")
    page.get_by_role("button", name="Delete this conversation").click()
    page.get_by_role("button", name="Delete for good").click()
    page.wait_for_url(f"{world.url}/")
    expect(page.get_by_role("link", name="Operation and Maintenance Agreement").first).to_be_visible()
    expect(page.get_by_role("link", name="Not wanted")).to_have_count(0)


def test_several_documents_are_asked_together(world, visit, contract):
    world.document("ann", b"The keeper of the lighthouse is Marta Kovalenko.\n" * 40, "lighthouse.txt")
    page = visit().give_cookie("ann")
    page.goto("/")
    page.get_by_label("Choose lighthouse.txt").check()
    page.get_by_label("Choose Operation and Maintenance Agreement").check()
    expect(page.get_by_text("2 documents chosen")).to_be_visible()
    page.get_by_role("button", name="Ask about them together").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("lighthouse.txt")
    page.get_by_label("Your question").fill("Who keeps it?")
    page.keyboard.press("Enter")
    expect(page.locator(".turn")).to_be_visible()
    expect(page.locator(".answer")).to_have_attribute("aria-busy", "false")


def test_what_cannot_be_read_says_why(visit):
    page = visit().give_cookie("dave")
    page.goto("/")
    page.get_by_label("Add documents").set_input_files(
        [
            {"name": "noise.bin", "mimeType": "application/octet-stream", "buffer": bytes(range(256)) * 8},
            {"name": "empty.txt", "mimeType": "text/plain", "buffer": b""},
            {"name": "cut.pdf", "mimeType": "application/pdf", "buffer": b"%PDF-1.7\n1 0 obj\n<<"},
        ]
    )
    expect(page.locator("#uploads li", has_text="noise.bin").get_by_role("alert")).to_be_visible()
    expect(page.locator("#uploads li", has_text="empty.txt").get_by_role("alert")).to_be_visible()
    expect(page.locator("#uploads")).not_to_contain_text(re.compile("Unsupported Media Type|Unprocessable"))
    expect(page.locator("#documents li", has_text="cut.pdf")).to_contain_text("Could not be read.")
