"use strict";
// Pulls a budget along the planner's curve; all that it says stands in tables as well.
for (const input of document.querySelectorAll(".pull input")) {
  const place = input.closest(".pull");
  const words = JSON.parse(input.dataset.words);
  const pictures = [...place.closest("section").querySelectorAll("svg")];
  const show = () => {
    place.querySelector("output").textContent = words[input.value];
    input.setAttribute("aria-valuetext", place.querySelectorAll("option")[input.value].label);
    for (const picture of pictures) {
      picture.querySelectorAll(".budget-point").forEach((point, index) => point.classList.toggle("chosen", index === Number(input.value)));
    }
  };
  input.addEventListener("input", show);
  place.hidden = false;
  show();
}
