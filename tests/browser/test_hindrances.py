"""What gets in the way of a page: many documents at once, proxies, other tabs, odd characters, other keyboards."""

import re

from playwright.sync_api import expect

from tests.browser.world import FEE


def test_the_page_answers_while_many_documents_are_read(world, visit):
    world.engine.chunk_delay_s = 0.3
    page = visit().give_cookie("frank")
    page.goto("/")
    files = [
        {"name": f"notes-{n}.txt", "mimeType": "text/plain", "buffer": f"Note {n}. ".encode() * 800} for n in range(9)
    ]
    page.get_by_label("Add documents").set_input_files(files)
    rows = page.locator("#documents li.document")
    expect(rows).to_have_count(9)
    page.get_by_role("button", name="Rename notes-0.txt").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    assert page.locator("[data-follow]").count() > 6, "most are not read yet"
    page.keyboard.press("Escape")
    world.engine.chunk_delay_s = 0.0
    expect(page.locator("[data-follow]")).to_have_count(0, timeout=60_000)
    expect(rows.get_by_role("checkbox")).to_have_count(9)


def test_a_list_that_was_made_before_a_document_was_read_does_not_stay(world, visit):
    """It comes while the row of the document is on its way, and takes its place."""
    world.engine.chunk_delay_s = 0.3
    page = visit().give_cookie("grace")
    page.goto("/")
    note = {"name": "late.txt", "mimeType": "text/plain", "buffer": b"A note. " * 800}
    page.get_by_label("Add documents").set_input_files([note])
    expect(page.locator("[data-follow]")).to_have_count(1)
    asked = []

    def answer(route):
        asked.append(route.request.url)
        page.evaluate("() => { const list = document.querySelector('#documents'); list.innerHTML = list.innerHTML; }")
        route.continue_()

    page.route("**/app/documents/*/row", answer, times=1)
    world.engine.chunk_delay_s = 0.0
    expect(page.locator("[data-follow]")).to_have_count(0, timeout=20_000)
    assert asked
    expect(page.locator("#documents li.document").get_by_role("checkbox")).to_have_count(1)


def test_a_proxy_that_has_no_server_for_a_moment_is_waited_out(world, visit, contract):
    world.engine.reply, world.engine.token_delay_s = (FEE, "."), 0.0
    page = visit().give_cookie("ann")
    page.goto(f"/app/documents/{contract}")
    page.route("**/questions", lambda route: route.fulfill(status=502, body="<h1>Bad Gateway</h1>"), times=1)
    page.get_by_label("Your question").fill("How much?")
    page.keyboard.press("Enter")
    expect(page.locator(".answer")).to_contain_text("2,340,000")


def test_a_conversation_is_still_there_after_the_switch(world, visit, contract):
    world.engine.reply, world.engine.token_delay_s = (FEE, "."), 0.0
    page = visit().give_cookie("ann")
    page.goto(f"/app/documents/{contract}")
    page.get_by_label("Your question").fill("How much?")
    page.keyboard.press("Enter")
    expect(page.locator(".answer")).to_have_attribute("aria-busy", "false")
    page.get_by_role("button", name="中文").click()
    expect(page.get_by_role("button", name="提问", exact=True)).to_be_visible()
    expect(page).to_have_url(re.compile(r"/app/sessions/ses_"))
    expect(page.locator(".answer")).to_contain_text("2,340,000")


def test_another_link_in_the_same_tab_is_opened(world, visit, contract):
    with world.client("ann") as client:
        body = {"with": "link", "access": "read"}
        token = client.post(f"/v1/documents/{contract}/shares", json=body).json()["token"]
    page = visit().page
    page.goto("/app/link#shr_01m8aaaaaaaa." + "a" * 43)
    expect(page.get_by_role("status")).to_contain_text("does not open anything")
    page.goto(f"/app/link#{token}")
    page.wait_for_url(re.compile(r"/link/shr_\w+/app/documents/"))


def test_a_long_quote_may_have_any_characters(visit, contract):
    page = visit().give_cookie("ann")
    page.goto(f"/app/documents/{contract}")
    page.evaluate(
        r"""async (document_id) => {
          const { Viewer } = await import("/app/static/viewer.js");
          new Viewer().open({ document_id, page: 1, quote: "x".repeat(199) + "\u{1d465} and more" }, null);
        }""",
        contract,
    )
    expect(page.locator("#page iframe")).to_have_attribute("src", re.compile(r"x%F0%9D%91%A5$"))


def test_the_enter_of_an_input_method_does_not_ask(visit, contract):
    page = visit().give_cookie("ann")
    page.goto(f"/app/documents/{contract}")
    question = page.get_by_label("Your question")
    question.fill("多少钱")
    question.evaluate("""e => e.dispatchEvent(
      new KeyboardEvent("keydown", { key: "Enter", keyCode: 229, bubbles: true, cancelable: true }))""")
    expect(question).to_have_value("多少钱")
    expect(page.locator(".turn")).to_have_count(0)
