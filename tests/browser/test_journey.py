"""The whole journey in a real browser, as somebody who has read no manual goes."""

import re

from playwright.sync_api import expect

from tests.browser.world import CONTRACT, FEE

ANSWER = (FEE, ", paid in ", "equal monthly parts. ", "Nobody pays for the ", "colour of the pumps.")


def test_from_signing_in_to_the_receipt(world, visit, picture):
    page, theirs = visit().sign_in("ann"), visit().sign_in("bob")
    expect(page.get_by_text("Nothing here yet")).to_be_visible()
    picture(page, "web-empty")
    upload(world, page, picture)
    ask(world, page)
    check(page, picture)
    follow_up(world, page)
    share(page, picture)
    use_share(theirs)
    delete(page, picture)
    theirs.reload()
    expect(theirs.get_by_role("heading")).to_contain_text("It is not there")
    page.get_by_role("button", name="Sign out").click()
    page.goto("/")
    assert "/app/sign-in" in page.url


def upload(world, page, picture):
    """And watch it being read."""
    world.engine.chunk_delay_s = 0.02
    page.get_by_label("Add documents").set_input_files(CONTRACT)
    row = page.locator("li.document")
    expect(row.get_by_role("progressbar")).to_be_visible()
    expect(row.locator(".reading-text")).to_contain_text(re.compile(r"Reading · [\d,]+ of [\d,]+ tokens"))
    picture(page, "web-reading")
    expect(row).to_contain_text("16 pages")
    world.engine.chunk_delay_s = 0.0


def ask(world, page):
    """See the answer come, with its cost and what is not in the document."""
    world.engine.reply = ANSWER
    world.engine.token_delay_s = 0.15
    page.get_by_role("link", name="contract.pdf").click()
    page.get_by_label("Your question").fill("How much is the yearly service charge?")
    page.keyboard.press("Enter")
    answer = page.locator(".turn").first.locator(".answer")
    expect(answer).to_contain_text("The yearly service")
    expect(answer).to_have_attribute("aria-busy", "true")
    expect(answer).to_have_attribute("aria-busy", "false")
    world.engine.token_delay_s = 0.0
    assert re.search(r"/app/sessions/ses_\w+$", page.url)
    expect(page.locator(".cost summary")).to_contain_text(re.compile(r"[\d,]+ tokens reused · \d+ computed"))
    expect(answer.locator(".unsupported")).to_have_text("Nobody pays for the colour of the pumps.")


def check(page, picture):
    """Open the page of a citation beside it; the words are marked."""
    chip = page.locator(".chip").first
    expect(chip).to_contain_text("2,340,000 pounds")
    chip.click()
    viewer = page.get_by_role("complementary")
    expect(viewer).to_be_focused()
    viewer.get_by_role("button", name="Text").click()
    expect(viewer.locator("mark")).to_contain_text("2,340,000 pounds")
    picture(page, "web-answer")
    viewer.get_by_role("button", name="Next page").click()
    expect(viewer.locator("mark")).to_have_count(0)
    page.keyboard.press("Escape")
    expect(chip).to_be_focused()


def follow_up(world, page):
    """In the same conversation; it is there after a reload."""
    world.engine.reply = ("The agreement expires at midnight on 31 January 2042.",)
    page.get_by_label("Your question").fill("When does it expire?")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator(".answer").nth(1)).to_contain_text("31 January 2042")
    page.reload()
    expect(page.locator(".answer")).to_have_count(2)


def share(page, picture):
    """With Bob, by name; a wrong name is told."""
    page.get_by_role("link", name="Documents").click()
    page.wait_for_url("**/")
    page.get_by_role("button", name="Share contract.pdf").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("textbox", name="Name").fill("nobody")
    dialog.get_by_role("button", name="Share", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("There is no user of this name")
    dialog.get_by_role("textbox", name="Name").fill("bob")
    dialog.get_by_role("button", name="Share", exact=True).click()
    expect(dialog.get_by_role("list")).to_contain_text("bob")
    picture(page, "web-share")
    dialog.get_by_role("button", name="Close").click()


def use_share(page):
    """Bob finds it, and asks, too."""
    page.reload()
    page.get_by_role("region", name="Shared with you").get_by_role("link", name="contract.pdf").click()
    page.get_by_label("Your question").fill("And now?")
    page.keyboard.press("Enter")
    expect(page.locator(".answer")).to_contain_text("31 January 2042")


def delete(page, picture):
    """With a question before and a receipt after; then it is nowhere."""
    dialog = page.get_by_role("dialog")
    page.get_by_role("button", name="Delete contract.pdf").click()
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    dialog.get_by_role("button", name="Delete for good").click()
    expect(dialog.get_by_role("heading")).to_have_text("Deleted")
    expect(dialog.get_by_role("row", name="Uploaded file")).to_be_visible()
    picture(page, "web-receipt")
    dialog.get_by_role("button", name="Close").click()
    expect(page.get_by_text("Nothing here yet")).to_be_visible()
